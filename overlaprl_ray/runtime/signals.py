"""SIGINT and SIGTERM end a run cleanly: actors stopped, files whole, and a line on how to resume it.

with stoppable():
    train_for_hours()      # raises Stopped; a second SIGINT ends the process at once
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The process was asked to end."""


_depth = 0  # blocks nest: Ray sets handlers of its own in between
_asked = 0  # how often since the outermost block began


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM of a block into `Stopped`; does nothing in a thread, as Tune's trials are."""
    global _asked, _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        global _asked
        _asked += 1
        if _asked == 1:
            raise Stopped(signal.Signals(number).name)
        if number == signal.SIGINT:
            os._exit(1)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    if _depth == 0:
        _asked = 0
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reraise_stopped() -> Iterator[None]:
    """Raise `Stopped` where a compiled function that it passed through, as Ray's are, made a `SystemError` of it."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, Stopped):
            raise error.__cause__ from None
        raise
