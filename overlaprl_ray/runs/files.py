"""A run's files on disk: claimed by one process at a time, cut back when a run is resumed, whole or not there.

with locked(folder):
    rows = cut_back(folder / "metrics.jsonl", step=50)
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from overlaprl_ray.errors import ConfigError, RunError

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder (made if need be) for this process; the system lets go of it even after a kill.

    Raises `ConfigError` where another process holds it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise ConfigError(
                f"output.dir = '{folder}': a run is under way there; wait for its end or give another folder"
            ) from None
    try:
        yield
    finally:
        lock.release()
        if [path.name for path in folder.iterdir()] == [LOCK]:  # nothing came of it
            (folder / LOCK).unlink()
            folder.rmdir()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Whatever keeps a file from being written becomes one line: a full disk, a folder made read-only."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"'{error.filename or folder}' cannot be written ({error.strerror or error}); make room or mend it"
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file that is present only when whole."""
    scratch = path.with_name(f"{path.name}.part")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the rows after a step, and a torn last line, from a jsonl file; returns what stays. No file: no rows."""
    if not path.exists():
        return []
    rows = []
    # not splitlines: completions may hold what Unicode calls a line's end
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            break  # torn: the process was killed while it wrote
        if row["step"] > step:
            break
        rows.append(row)
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows
