"""The files of run folders as tables: whole, growing or broken ones, thousands in seconds. `loading.load` joins them.

tables = read_runs([Path("runs/x")], problems=[]); tables["history"], tables["evals"], tables["decisions"]
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from overlaprl_ray.reports.trials import NUMBERS as TRIAL_NUMBERS
from overlaprl_ray.reports.trials import frame, read_mapping, trial_row
from overlaprl_ray.runs.summary import discard_report

TRAITS = ("length", "reward", "difficulty", "lag")
DECISIONS = ("fresh", "stale", "discard")
HISTORY, EVALS = ["step", "wall_s", "tokens", "reward"], ["step", "accuracy"]  # numbers that each row must have
Count = tuple[str, str, str, int]  # trait, bin, decision, rows
COLUMNS = {  # the least that each table has, with or without rows
    "trials": ["trial", "source", "status", "error", "mode", "lag", "rule", *TRIAL_NUMBERS],
    "history": ["trial", *HISTORY],
    "evals": ["trial", *EVALS],
    "decisions": ["trial", "trait", "bin", "decision", "rows"],
}


def read_runs(folders: list[Path], problems: list[str]) -> dict[str, pd.DataFrame]:
    """Run folders as the tables of `COLUMNS`; what cannot be read is added to `problems` in words."""
    twice = pd.Series([folder.name for folder in folders]).duplicated(keep=False)
    names = [f"{f.parent.name}/{f.name}" if same else f.name for f, same in zip(folders, twice, strict=True)]
    about = [trial_row(folder, problems) | {"folder": str(folder)} for folder in folders]
    history, evals, decisions = (
        _stack([read(folder) for folder in folders], names, COLUMNS[table])
        for table, read in {
            "history": lambda folder: pd.DataFrame(_read_rows(folder / "metrics.jsonl", HISTORY, problems)),
            "evals": lambda folder: pd.DataFrame(_read_rows(folder / "eval.jsonl", EVALS, problems)),
            "decisions": lambda folder: pd.DataFrame(_decisions(folder, problems), columns=COLUMNS["decisions"][1:]),
        }.items()
    )
    trials = _progress(frame(about).assign(trial=names), history, evals)
    return {"trials": trials, "history": history, "evals": evals, "decisions": decisions}


def _read_rows(path: Path, numbers: list[str], problems: list[str]) -> list[dict[str, Any]]:
    """The rows of a JSON lines file that hold these numbers; a step written twice counts as it was written last."""
    data = path.read_bytes() if path.is_file() else b""
    whole, _, torn = data.rpartition(b"\n")
    if torn:
        problems.append(f"{path}: the last line is cut short; left out")
    lines = [line for line in whole.split(b"\n") if line.strip()]
    rows, broken = {}, 0
    for line in lines:
        try:
            row = json.loads(line)
            if any(not isinstance(row[name], int | float) for name in numbers):
                raise TypeError
            rows[row["step"]] = row
        except (ValueError, TypeError, KeyError, IndexError):
            broken += 1
    if broken:
        problems.append(f"{path}: {broken} of {len(lines)} lines cannot be read; left out")
    return list(rows.values())


def _stack(parts: list[pd.DataFrame], names: list[str], columns: list[str]) -> pd.DataFrame:
    """One table of all trials."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(columns=columns)
    out = pd.concat(filled, ignore_index=True).infer_objects()
    codes = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    out.insert(0, "trial", pd.Categorical.from_codes(codes, categories=names))
    return out


def _progress(trials: pd.DataFrame, history: pd.DataFrame, evals: pd.DataFrame) -> pd.DataFrame:
    """What a run without a summary has come to, by the summary's own definitions, from its rows."""
    unended = trials["trial"][trials["status"].isin(["running", "error"])]
    rows = history[history["trial"].isin(unended)].sort_values("step")
    if rows.empty:
        return trials
    groups = rows.groupby("trial", observed=True)
    found = groups[["wall_s", "tokens"]].last().assign(steps=groups.size())
    found["reward_first_10"] = groups.head(10).groupby("trial", observed=True)["reward"].mean()
    found["reward_last_10"] = groups.tail(10).groupby("trial", observed=True)["reward"].mean()
    found["accuracy_start"] = evals[evals["step"] == 0].set_index("trial")["accuracy"]
    found["accuracy_best"] = evals.groupby("trial", observed=True)["accuracy"].max()
    found.index = found.index.astype("str")
    return trials.set_index("trial").combine_first(found).loc[trials["trial"]].reset_index()[list(trials)]


def _decisions(folder: Path, problems: list[str]) -> list[Count]:
    """Rows by trait, bin and decision, over all steps: of a finished run as its summary has them, else counted here."""
    by = (read_mapping(folder / "summary.json", []).get("thrown_away") or {}).get("by")
    if by is None:
        path = folder / "decisions.jsonl"
        try:
            by = discard_report(_read_rows(path, ["step", "lag", "generate_s"], problems))["by"]
        except (ValueError, TypeError, KeyError, IndexError):
            problems.append(f"{path}: holds no cells of decisions; left out")
            by = {}
    cells = [(trait, cell) for trait, found in by.items() for cell in found]
    return [(trait, cell["bin"], name, cell[name]) for trait, cell in cells for name in DECISIONS if cell[name]]
