"""A run's files: held by one process at a time, cut back on resume, whole or absent.

with locked(folder):
    rows = cut_back(folder / "metrics.jsonl", step=50)
"""

import json
import math
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
    """Hold a run's folder, created if need be, for this process; a kill releases it.

    Raises `ConfigError` where another process holds it.
    """
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise ConfigError(
                f"output.dir = '{folder}': a run is under way there; wait until it ends, or give another folder"
            ) from None
    try:
        yield
    finally:
        lock.release()
        if [path.name for path in folder.iterdir()] == [LOCK]:  # the run wrote nothing
            (folder / LOCK).unlink()
            folder.rmdir()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn whatever keeps a file from being written, a full disk or a read-only folder, into one line."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"'{error.filename or folder}' cannot be written ({error.strerror or error}); free some space, or fix the "
            "permissions"
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file that is whole or absent at any moment."""
    scratch = path.with_name(f"{path.name}.part")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def last_step(path: Path) -> int:
    """The step of the last whole row of a jsonl file; 0 without one."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the rows after a step, and a torn last line, from a jsonl file; returns the rest. No file, no rows."""
    rows = read_rows(path, step)
    if path.exists():
        replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def read_rows(path: Path, until: float = math.inf) -> list[dict[str, Any]]:
    """The rows of a jsonl file up to a step, without a torn last line. No file, no rows."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    # not splitlines: completions may hold what Unicode counts as line ends
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            break  # torn: the process was killed while writing it
        if row["step"] > until:
            break
        rows.append(row)
    return rows


def as_json(row: dict[str, Any]) -> str:
    """A row as a line of a jsonl file; JSON has neither NaN nor infinity, so they become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, ensure_ascii=False, allow_nan=False)
