"""Runs and sweeps as tidy tables: `trials`, `history`, `evals`, `decisions`, and what could not be read.

Reads finished, running and broken runs; a sweep of thousands in seconds. Knows neither Ray nor torch.

    results = load("runs/modes", "runs/x"); results.history.groupby("trial")["reward"].last()
    save(results, "analysis/results/study", compact=True)
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.reports.run_files import COLUMNS, read_runs
from overlaprl_ray.reports.trials import FILES, ordered

_DEPTH = 4  # folders of sweeps of runs: deeper is somebody's home


@dataclass(frozen=True)
class Results:
    """Tidy tables; `trial` joins them. See `load`."""

    trials: pd.DataFrame  # a row per trial: trial, source, status, error, settings by dotted name, summary
    history: pd.DataFrame  # a row per trial and step: metrics.jsonl's columns
    evals: pd.DataFrame  # trial, step, version, accuracy, n
    decisions: pd.DataFrame  # trial, trait (length, reward, difficulty, lag), bin, decision, rows: summed over steps
    problems: list[str]  # what could not be read, in words

    def of(self, keep: pd.Series) -> "Results":
        """The trials for which `keep`, a boolean aligned with `trials`, is true, with their rows of all tables."""
        if keep.all():
            return self
        trials = self.trials[keep]

        def theirs(table: pd.DataFrame) -> pd.DataFrame:
            return table[table["trial"].isin(trials["trial"])]

        return Results(trials, theirs(self.history), theirs(self.evals), theirs(self.decisions), self.problems)

    @cached_property
    def done(self) -> "Results":
        """The trials that came to their end: the only ones that aggregates count."""
        return self.of(self.trials["status"] == "done")


def load(*folders: str | Path) -> Results:
    """Read run folders, sweep folders, folders of either, and folders that hold only saved tables.

    Raises `ConfigError` where a folder does not exist or holds nothing that can be read.
    """
    problems: list[str] = []
    parts: list[Results] = []
    seen: set[Path] = set()
    for folder in dict.fromkeys(Path(f).expanduser().resolve() for f in folders):
        runs, saved = ([path for path in paths if path not in seen] for paths in _find(folder, problems))
        seen |= {*runs, *saved}
        if seen and not (runs or saved):
            continue  # it lies in a folder that was given before
        tables = [_read_saved(path, problems) for path in saved] + ([read_runs(runs, problems)] if runs else [])
        found = [Results(**table, problems=problems) for table in tables if len(table["trials"])]
        if not found:
            why = f"; {problems[-1]}" if problems else ""
            raise ConfigError(f"folder '{folder}': holds no run, sweep or saved table that can be read{why}")
        parts += [replace(part, trials=part.trials.assign(source=folder.name)) for part in found]
    if not parts:
        raise ConfigError("no folder given; give a run's or a sweep's folder")
    return _join(parts, problems)


def load_or_explain(*folders: str | Path) -> Results:
    """`load` for notebooks: what keeps it from loading is printed, and the results are empty."""
    try:
        return load(*folders)
    except ConfigError as error:
        print(error)
        return Results(
            **{name: pd.DataFrame(columns=columns) for name, columns in COLUMNS.items()}, problems=[str(error)]
        )


# ---- finding ----


def _find(folder: Path, problems: list[str], depth: int = _DEPTH) -> tuple[list[Path], list[Path]]:
    """Run folders and folders of saved tables at or under a folder; a sweep's own runs go before its saved tables."""
    if not folder.is_dir():
        raise ConfigError(f"folder '{folder}': no such folder; give a run's or a sweep's folder")
    if any((folder / name).is_file() for name in FILES):
        return [folder], []
    trials = folder / "trials"
    if trials.is_dir():
        inside = sorted(path for path in trials.iterdir() if path.is_dir())
        runs = [path for path in inside if any((path / name).is_file() for name in FILES)]
        problems += [f"{path}: holds no file of a run; left out" for path in sorted({*inside} - {*runs})]
        if runs:
            return runs, []
    if (folder / "trials.parquet").is_file():
        return [], [folder]
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    found = [_find(path, problems, depth - 1) for path in below] if depth else []
    return [run for runs, _ in found for run in runs], [path for _, saved in found for path in saved]


def _join(parts: list[Results], problems: list[str]) -> Results:
    """All parts as one; a trial's name that occurs twice is made distinct by its number."""
    taken: set[str] = set()
    renamed = []
    for part in parts:
        names = {}
        for name in part.trials["trial"]:
            fresh = name
            while fresh in taken:
                fresh = f"{fresh}+"
            taken.add(fresh)
            names[name] = fresh
        tables = (getattr(part, table) for table in COLUMNS)
        renamed.append([table.assign(trial=table["trial"].astype("str").map(names)) for table in tables])
    joined = [pd.concat(tables, ignore_index=True) for tables in zip(*renamed, strict=True)]
    for table in joined[1:]:
        table["trial"] = pd.Categorical(table["trial"], categories=joined[0]["trial"])
    return Results(ordered(joined[0]).reset_index(drop=True), joined[1], joined[2], joined[3], problems)


# ---- saved tables ----


def save(results: Results, folder: str | Path, *, compact: bool = False) -> None:
    """Write trials, history, evals and decisions as parquet; `load` reads them back.

    `compact` is for tables to be committed, at about 50 bytes a step: no memory columns, and the other float metrics of
    `history` to within 3e-5 of their value.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in COLUMNS:
        table: pd.DataFrame = getattr(results, name)
        table = table.drop(columns="folder", errors="ignore")  # of this machine
        rows = pa.Table.from_pandas(_compact(table) if compact and name == "history" else table, preserve_index=False)
        floats = [field.name for field in rows.schema if pa.types.is_floating(field.type)]
        pa.parquet.write_table(
            rows,
            folder / f"{name}.parquet",
            compression="zstd",
            compression_level=15,
            use_dictionary=[column for column in rows.column_names if column not in floats],
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),  # floats compress by their bytes' places
        )


def _compact(history: pd.DataFrame) -> pd.DataFrame:
    """Floats of 32 bits, the last nine of them rounded off: zeros compress. Small fractions as k/256 stay exact."""
    out = history[[name for name in history.columns if not name.startswith("memory/")]].copy()
    for name in out.columns[out.dtypes == np.float64]:
        bits = out[name].to_numpy(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(1 << 8)) & np.uint32(0xFFFFFE00)
        out[name] = np.where(np.isfinite(out[name]), rounded.view(np.float32), out[name].to_numpy(np.float32))
    return out


def _read_saved(folder: Path, problems: list[str]) -> dict[str, pd.DataFrame]:
    """Tables that `save` wrote; a table that is missing or no such table counts as empty, without trials all are."""
    tables = {name: _read_table(folder / f"{name}.parquet", name, problems) for name in COLUMNS}
    known = tables["trials"]["trial"]
    return {name: table[table["trial"].isin(known)] for name, table in tables.items()}


def _read_table(path: Path, name: str, problems: list[str]) -> pd.DataFrame:
    empty = pd.DataFrame(columns=COLUMNS[name])
    if not path.is_file():
        problems.append(f"{path}: not there")
        return empty
    try:
        table = pd.read_parquet(path)
    except (OSError, pa.ArrowInvalid) as error:
        problems.append(f"{path}: cannot be read ({' '.join(str(error).split())[:100]}); left out")
        return empty
    missing = [column for column in COLUMNS[name] if column not in table]
    if missing:
        problems.append(f"{path}: no column '{missing[0]}', so not a table of ours; left out")
    return empty if missing else table
