"""Runs and sweeps as tidy tables: `trials`, `history`, `evals`, `decisions`, and what could not be read.

Reads finished, running and broken runs; a sweep of thousands in seconds. Knows neither Ray nor torch.

    results = load("runs/modes", "runs/x"); results.history.groupby("trial")["reward"].last()
    save(results, "analysis/results/study", compact=True)
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.reports.run_files import COLUMNS, read_runs
from overlaprl_ray.reports.trials import FILES, labels, ordered

KEPT = {"trial", "step", "wall_s", "tokens", "reward", "loss", "staleness/lag", "staleness/kl", "staleness/frac_fresh",
        "staleness/frac_stale", "staleness/frac_discarded"}  # fmt: skip
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
        trials = self.trials[keep]
        rows = {name: getattr(self, name) for name in COLUMNS if name != "trials"}
        return replace(self, trials=trials, **{n: t[t["trial"].isin(trials["trial"])] for n, t in rows.items()})

    @cached_property
    def done(self) -> "Results":
        """The trials that came to their end: the only ones that aggregates count."""
        return self.of(self.trials["status"] == "done")

    @cached_property
    def settings(self) -> pd.Series:
        """What each trial is called beside the others, by its name; those without a configuration are left out."""
        known = self.trials[self.trials["mode"].notna()]
        return labels(known).set_axis(known["trial"].to_list())


def load(*folders: str | Path) -> Results:
    """Read run folders, sweep folders, folders of either, and folders that hold only saved tables.

    Raises `ConfigError` where a folder does not exist or holds nothing that can be read.
    """
    problems: list[str] = []
    parts: list[Results] = []
    seen: set[Path] = set()
    for folder in dict.fromkeys(Path(f).expanduser().resolve() for f in folders):
        places = _find(folder, problems)
        new = [place for place in places if place not in seen]
        seen |= {*new}
        runs = [place for place in new if _is_run(place)]
        tables = [_read_saved(place, problems) for place in new if place not in runs]
        tables += [read_runs(runs, problems)] if runs else []
        found = [Results(**table, problems=problems) for table in tables if len(table["trials"])]
        if not found and not (places and not new):  # else it lies in a folder that was given before
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
        tables = {name: pd.DataFrame(columns=columns) for name, columns in COLUMNS.items()}
        return Results(**tables, problems=[str(error)])


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def _find(folder: Path, problems: list[str], depth: int = _DEPTH) -> list[Path]:
    """Run folders and folders of saved tables at or under a folder; a sweep's own runs go before its saved tables."""
    if not folder.is_dir():
        raise ConfigError(f"folder '{folder}': no such folder; give a run's or a sweep's folder")
    if _is_run(folder):
        return [folder]
    inside = sorted(path for path in (folder / "trials").glob("*") if path.is_dir())
    problems += [f"{path}: holds no file of a run; left out" for path in inside if not _is_run(path)]
    if runs := [path for path in inside if _is_run(path)]:
        return runs
    if (folder / "trials.parquet").is_file():
        return [folder]
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [found for path in below if depth for found in _find(path, problems, depth - 1)]


def _join(parts: list[Results], problems: list[str]) -> Results:
    """All parts as one; a trial's name that occurs twice is made distinct by a plus sign."""
    taken: set[str] = set()
    renamed: dict[str, list[pd.DataFrame]] = {name: [] for name in COLUMNS}
    for part in parts:
        names = {}
        for name in part.trials["trial"]:
            names[name] = name
            while names[name] in taken:
                names[name] += "+"
            taken.add(names[name])
        for name, tables in renamed.items():
            table = getattr(part, name)
            tables.append(table.assign(trial=table["trial"].astype("str").map(names)))
    joined = {name: pd.concat(tables, ignore_index=True) for name, tables in renamed.items()}
    for table in list(joined.values())[1:]:
        table["trial"] = pd.Categorical(table["trial"], categories=joined["trials"]["trial"])
    joined["trials"] = ordered(joined["trials"]).reset_index(drop=True)
    return Results(**joined, problems=problems)


def save(results: Results, folder: str | Path, *, compact: bool = False) -> None:
    """Write trials, history, evals and decisions as parquet; `load` reads them back.

    `compact` is for tables to be committed: of `history` only what figures and a repetition of the run need.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in COLUMNS:
        table: pd.DataFrame = getattr(results, name).drop(columns="folder", errors="ignore")  # of this machine
        if compact and name == "history":
            table = table[[column for column in table if column in KEPT]]
        floats = list(table.select_dtypes("float"))
        table.to_parquet(folder / f"{name}.parquet", index=False, compression="zstd", compression_level=15,
                         use_dictionary=[column for column in table if column not in floats],
                         # floats compress by their bytes' places
                         column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"))  # fmt: skip


def _read_saved(folder: Path, problems: list[str]) -> dict[str, pd.DataFrame]:
    """Tables that `save` wrote; a table that is missing or no such table counts as empty, without trials all are."""
    tables = {name: _read_table(folder / f"{name}.parquet", name, problems) for name in COLUMNS}
    known = tables["trials"]["trial"]
    return {name: table[table["trial"].isin(known)] for name, table in tables.items()}


def _read_table(path: Path, name: str, problems: list[str]) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path)
        if missing := [column for column in COLUMNS[name] if column not in table]:
            raise ValueError(f"no column '{missing[0]}', so not a table of ours")
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        problems.append(f"{path}: cannot be read ({' '.join(str(error).split())[:100]}); left out")
        return pd.DataFrame(columns=COLUMNS[name])
    return table
