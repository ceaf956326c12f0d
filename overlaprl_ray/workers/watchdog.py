"""Ends a process whose reward functions take too long: they have its main thread, where only their own end stops them.

What ended it is left as a file in the run's folder, for whoever waits for the process:

    with time_limit(60.0, "batch 3: scoring took too long", Path("runs/x"), "0"):
        total, parts = score(...)
    take_timeout(Path("runs/x"))    # in another process: "batch 3: ...", or None
"""

import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlaprl_ray.errors import RunError

GRACE_S = 1.0  # after which a function that lets no other thread run is ended all the same
FILES = "scoring-{}.txt"


@contextmanager
def time_limit(seconds: float, message: str, folder: Path | None, name: str) -> Iterator[None]:
    """End this process with `message`, one line, where the block takes longer. No two at a time in one process."""
    path = (folder if folder and folder.is_dir() else Path(tempfile.gettempdir())) / FILES.format(name)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{message}\n")
        file.flush()

        def end() -> None:
            file.write("timed out\n")
            file.flush()
            print(f"error: {message}", file=sys.__stderr__, flush=True)
            os._exit(RunError.exit_code)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        # needs no thread of Python's, as long regular expressions hold them all; adds lines to the file
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()
            path.unlink(missing_ok=True)


def take_timeout(folder: Path) -> str | None:
    """The message of a process that was ended here, once; one that was killed while it scored left a single line."""
    for path in sorted(folder.glob(FILES.format("*"))):
        message, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        path.unlink()
        if rest:
            return message
    return None
