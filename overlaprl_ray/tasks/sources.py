"""Rows of data from local files, folders and the Hugging Face hub, each with the place it came from.

A place ("train.jsonl, line 7") is what an error about a row names. Local JSON lines and CSV are read as they are
written, without a library that would guess types: an answer `007` stays `007`.
"""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks.hub import prefer_cache_when_unreachable

Row = tuple[str, dict[str, Any]]  # where it stands, its columns

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", re.ASCII)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{path}, line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is not JSON: {error.msg}") from error


def _json(path: Path) -> Iterator[Row]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError(f"it holds a {type(rows).__name__}, not a list of objects")
    yield from ((f"{path}, item {number}", row) for number, row in enumerate(rows, start=1))


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            yield f"{path}, line {reader.line_num}", {name: value for name, value in row.items() if name is not None}


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet  # half a second, and comes with `datasets`

    for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
        yield f"{path}, row {number}", row


READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet, ".csv": _csv}


def read_file(path: Path, field: str = "task.path") -> list[Row]:
    """The rows of one file, by its suffix. ConfigError naming `field` if it is missing, empty or unreadable."""
    reader = READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise ConfigError(f"{field}: no file {path}; give the path of a {', '.join(READERS)} file")
    try:
        rows = list(reader(path))
    except (OSError, ValueError, csv.Error) as error:  # not permitted; not UTF-8, JSON or parquet (all ValueErrors)
        raise ConfigError(f"{field}: {path} cannot be read ({error}); mend it or give another {path.suffix}") from error
    if not rows:
        raise ConfigError(f"{field}: {path} has no rows; give a file with at least one problem")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{field}: {where} holds {row!r:.60}; each must be an object with named columns")
    return rows


def _folder_file(folder: Path, split: str) -> Path | None:
    return next((folder / f"{split}{suffix}" for suffix in READERS if (folder / f"{split}{suffix}").is_file()), None)


def _hub(name: str) -> dict[str, list[Row]]:
    """Every split of a hub dataset, "owner/name" or "owner/name:configuration" (downloaded once, then cached)."""
    prefer_cache_when_unreachable()
    from datasets import load_dataset  # two seconds, and needed for the hub only

    repository, _, configuration = name.partition(":")
    try:
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
    """Training rows, and test rows where `source` has some: a file, a folder with train.* and test.*, or a hub name.

    ConfigError if it is none of these or has no training rows. A hub dataset without `test` gives its `validation`.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        train, test = _folder_file(path, "train"), _folder_file(path, "test")
        if train is None:
            raise ConfigError(f"task.path: {path} has no train file; name it train{'|'.join(READERS)}, or give a file")
        return read_file(train), read_file(test) if test else None
    if path.exists() or not HUB_NAME.fullmatch(source) or path.suffix.lower() in READERS:
        return read_file(path), None
    splits = _hub(source)
    if not splits.get("train"):
        raise ConfigError(f"task.path: {source!r} has no rows in a train split, only {', '.join(splits)}; give another")
    return splits["train"], splits.get("test") or splits.get("validation")
