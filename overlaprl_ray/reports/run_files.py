"""The files of run folders as tables: whole, growing or broken ones. `loading.load` joins them.

tables = read_runs([Path("runs/x")], problems=[]); tables["history"], tables["evals"], tables["decisions"]
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from overlaprl_ray.reports.trials import NUMBERS as TRIAL_NUMBERS
from overlaprl_ray.reports.trials import frame, read_mapping, trial_row

TRAITS = ("length", "reward", "difficulty", "lag")
BINS = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")  # of all traits but the lag
DECISIONS = ("fresh", "stale", "discard")
NUMBERS = {"metrics.jsonl": ["step", "wall_s", "tokens", "reward"], "eval.jsonl": ["step", "accuracy"]}  # must be there
Count = tuple[str, str, str, int]  # trait, bin, decision, rows
COLUMNS = {  # the least that each table has, with or without rows
    "trials": ["trial", "source", "status", "error", "mode", "lag", "rule", *TRIAL_NUMBERS],
    "history": ["trial", *NUMBERS["metrics.jsonl"]],
    "evals": ["trial", *NUMBERS["eval.jsonl"]],
    "decisions": ["trial", "trait", "bin", "decision", "rows"],
}


def read_runs(folders: list[Path], problems: list[str]) -> dict[str, pd.DataFrame]:
    """Run folders as the tables of `COLUMNS`; what cannot be read is added to `problems` in words."""
    names = [folder.name for folder in folders]
    twice = {name for name, count in Counter(names).items() if count > 1}
    names = [f"{folder.parent.name}/{folder.name}" if folder.name in twice else folder.name for folder in folders]
    rows = [
        {**trial_row(folder, problems), "trial": name, "folder": str(folder)}
        for name, folder in zip(names, folders, strict=True)
    ]
    history, evals = (_stack(folders, names, file, problems) for file in NUMBERS)
    counts = [(n, *count) for n, folder in zip(names, folders, strict=True) for count in _decisions(folder, problems)]
    decisions = pd.DataFrame(counts, columns=COLUMNS["decisions"])
    return {
        "trials": _progress(frame(rows), history, evals),
        "history": history,
        "evals": evals,
        "decisions": decisions,
    }


def _stack(folders: list[Path], names: list[str], file: str, problems: list[str]) -> pd.DataFrame:
    """One table of all trials; a step written twice counts as it was written last."""
    tables = {}
    for name, folder in zip(names, folders, strict=True):
        table = pd.DataFrame(_read_jsonl(folder / file, problems))
        wrong = [column for column in NUMBERS[file] if not is_numeric_dtype(table.get(column, pd.Series(dtype=object)))]
        if len(table) and wrong:
            problems.append(f"{folder / file}: no numbers under '{wrong[0]}'; left out")
        elif len(table):
            empty = table.columns[table.isna().all()]
            tables[name] = table.astype(dict.fromkeys(empty, "float64"))
    if not tables:
        return pd.DataFrame(columns=["trial", *NUMBERS[file]])
    out = pd.concat(tables, names=["trial", None]).reset_index("trial").reset_index(drop=True)
    texts = [column for column in out if not is_numeric_dtype(out[column])]
    out = out.astype({**dict.fromkeys(texts, "category"), "trial": pd.CategoricalDtype(names)})
    return out.dropna(subset="step").drop_duplicates(["trial", "step"], keep="last").reset_index(drop=True)


def _read_jsonl(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """A file's rows. A last line cut short is left out, and other broken lines are too."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        problems.append(f"{path}: the last line is cut short; left out")
    lines = [line for line in whole.splitlines() if line.strip()]
    rows = [row for row in map(_parse, lines) if row is not None]
    if len(rows) < len(lines):
        problems.append(f"{path}: {len(lines) - len(rows)} of {len(lines)} lines cannot be read; left out")
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _progress(trials: pd.DataFrame, history: pd.DataFrame, evals: pd.DataFrame) -> pd.DataFrame:
    """What a run without a summary has come to, by the summary's own definitions, from its rows."""
    unended = trials["trial"][trials["status"].isin(["running", "error"])]
    rows = history[history["trial"].isin(unended)].sort_values("step")
    if rows.empty:
        return trials
    groups = rows.groupby("trial", observed=True)
    so_far = groups[["wall_s", "tokens"]].last().assign(steps=groups.size())
    so_far["reward_first_10"] = groups["reward"].apply(lambda rewards: rewards.head(10).mean())
    so_far["reward_last_10"] = groups["reward"].apply(lambda rewards: rewards.tail(10).mean())
    so_far["accuracy_start"] = evals[evals["step"] == 0].set_index("trial")["accuracy"]
    so_far["accuracy_best"] = evals.groupby("trial", observed=True)["accuracy"].max()
    out = trials.copy()
    for name in so_far:
        values = out["trial"].map(so_far[name].to_dict())
        out[name] = out[name].fillna(values) if name in out else values
    return out


def _decisions(folder: Path, problems: list[str]) -> list[Count]:
    """Rows by trait, bin and decision, over all steps: of a finished run as its summary has them, else counted here."""
    by = (read_mapping(folder / "summary.json", []).get("thrown_away") or {}).get("by")
    if by is not None:
        cells = [(trait, cell) for trait, found in by.items() for cell in found]
        return [(trait, cell["bin"], name, cell[name]) for trait, cell in cells for name in DECISIONS if cell[name]]
    counts: Counter[tuple[str, str, str]] = Counter()
    path = folder / "decisions.jsonl"
    for row in _read_jsonl(path, problems):  # cells are [length, reward, difficulty (bins), decision, rows]
        try:
            for *bins, decision, rows in row["cells"]:
                values = [*(BINS[place] for place in bins), str(int(row["lag"]))]
                counts.update({(trait, value, decision): rows for trait, value in zip(TRAITS, values, strict=True)})
        except (ValueError, TypeError, KeyError, IndexError):
            problems.append(f"{path}: holds no cells of decisions; left out from there")
            break
    return [(*key, int(count)) for key, count in counts.items()]
