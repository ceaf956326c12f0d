"""Rows of data from local files, folders and the Hugging Face hub, each with the place it came from.

A place ("train.jsonl, line 7") is what an error about a row names. Local JSON and CSV are read as they are written,
without a library that would guess types: an answer `007` stays `007`, and one column may hold numbers and texts.
"""

import csv
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks.hub import holds

Row = tuple[str, dict[str, Any]]  # where it stands, its columns

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", re.ASCII)
HELD_OUT = ("test", "validation")  # the names of splits that are held out; the first that is there


def _number(text: str) -> float | Decimal:
    """A number of a JSON file: a float unless that would round what is written."""
    value = float(text)
    return value if not isfinite(value) or Decimal(text) == Decimal(repr(value)) else Decimal(text)


def _json(path: Path) -> Iterator[Row]:
    """A list of objects or an object a line, whichever of the two suffixes the file has."""
    text = path.read_text(encoding="utf-8-sig")
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    try:
        if isinstance(whole := json.loads(text if lines else "[]", parse_float=_number), list):
            yield from ((f"{path}, item {number}", row) for number, row in enumerate(whole, start=1))
            return
        lines = [("line 1", text)]
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # what a second line is to the first
            raise ValueError(f"line {error.lineno} is not JSON: {error.msg}") from error
    for where, line in lines:
        try:
            yield f"{path}, {where}", json.loads(line, parse_float=_number)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg}") from error


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} has more cells than the first; put quotes around commas")
            yield f"{path}, line {reader.line_num}", row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet  # half a second, and comes with `datasets`

    for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
        yield f"{path}, row {number}", row


READERS = {".jsonl": _json, ".json": _json, ".parquet": _parquet, ".csv": _csv}


def read_file(path: Path, field: str = "task.path") -> list[Row]:
    """The rows of one file, by its suffix. ConfigError naming `field` if it is missing, empty or unreadable."""
    reader = READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise ConfigError(f"{field}: no file {path}; give the path of a {', '.join(READERS)} file")
    try:
        rows = list(reader(path))
    except (OSError, ValueError, csv.Error) as error:  # not permitted; not UTF-8, JSON or parquet (all ValueErrors)
        raise ConfigError(f"{field}: {path} cannot be read ({error}); fix it or give another {path.suffix}") from error
    if not rows:
        raise ConfigError(f"{field}: {path} has no rows; give a file with at least one problem")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{field}: {where} holds {row!r:.60}; each must be an object with named columns")
    return rows


def _hub(name: str) -> dict[str, list[Row]]:
    """Every split of a hub dataset, "owner/name" or "owner/name:configuration" (downloaded once, then cached)."""
    from datasets import load_dataset  # two seconds, and needed for the hub only

    repository, _, configuration = name.partition(":")
    try:
        holds(repository, "README.md", "dataset")  # out of reach, the hub is not asked again
        splits = load_dataset(repository, configuration or None)
    except Exception as error:  # offline, not found, gated, several configurations: each has its own type
        reason = " ".join([type(error).__name__ + ":", *str(error).splitlines()[:1]])
        raise ConfigError(
            f"task.path: {name!r} is no local file or folder, and the hub did not give it ({reason:.200}); "
            "give a local path, or owner/name:configuration of a hub dataset"
        ) from error
    return {
        split: [(f"{name} {split}, row {number}", dict(row)) for number, row in enumerate(rows, start=1)]
        for split, rows in splits.items()
    }


def read_splits(source: str) -> tuple[list[Row], list[Row] | None]:
    """Training rows, and held-out rows where `source` has some: a file, a folder with train.*, or a hub name.

    Held out is `test`, else `validation`. ConfigError if `source` is none of these or has no training rows.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = {split: path / f"{split}{suffix}" for suffix in reversed(READERS) for split in ("train", *HELD_OUT)
                 if (path / f"{split}{suffix}").is_file()}  # fmt: skip
        if "train" not in files:
            raise ConfigError(f"task.path: {path} has no train file; name it train{'|'.join(READERS)}, or give a file")
        splits = {split: read_file(file) for split, file in files.items()}
    elif path.exists() or not HUB_NAME.fullmatch(source) or path.suffix.lower() in READERS:
        splits = {"train": read_file(path)}
    else:
        splits = _hub(source)
    if not splits.get("train"):
        raise ConfigError(f"task.path: {source!r} has no rows in a train split, only {', '.join(splits)}; give another")
    return splits["train"], next((splits[split] for split in HELD_OUT if splits.get(split)), None)
