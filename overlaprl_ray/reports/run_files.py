"""The files of run folders as tables: whole, growing or broken ones, thousands in seconds. `loading.load` joins them.

tables = read_runs([Path("runs/x")], problems=[]); tables["history"], tables["evals"], tables["decisions"]
"""

import io
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.json

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

    def read(folder: Path) -> tuple[dict[str, Any], list[pa.Table | None], list[Count], list[str]]:
        said: list[str] = []
        tables = [_read_jsonl(folder / name, said) for name in NUMBERS]
        return trial_row(folder, said), tables, _decisions(folder, said), said

    with ThreadPoolExecutor() as pool:  # the parsers of Arrow let go of the interpreter
        read_all = list(pool.map(read, folders))
    names = _distinct(folders)
    rows = [
        {**row, "trial": name, "folder": str(folder)}
        for name, folder, (row, *_) in zip(names, folders, read_all, strict=True)
    ]
    for *_, said in read_all:
        problems += said
    history, evals = (
        _stack([tables[i] for _, tables, _, _ in read_all], [f / name for f in folders], names, problems)
        for i, name in enumerate(NUMBERS)
    )
    counts = [(name, *count) for name, (_, _, found, _) in zip(names, read_all, strict=True) for count in found]
    decisions = pd.DataFrame(counts, columns=COLUMNS["decisions"])
    trials = _progress(frame(rows), history, evals)
    return {"trials": trials, "history": history, "evals": evals, "decisions": decisions}


def _distinct(folders: list[Path]) -> list[str]:
    """Folder names; where two are the same, with the folder above."""
    names = [folder.name for folder in folders]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return [f"{folder.parent.name}/{folder.name}" if folder.name in twice else folder.name for folder in folders]


def _read_jsonl(path: Path, problems: list[str]) -> pa.Table | None:
    """A file of JSON lines; None without rows. A last line cut short is left out, and other broken lines are too."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        problems.append(f"{path}: the last line is cut short; left out")
    if not whole.strip():
        return None
    if not _looks_whole(whole):
        return _read_lines(path, whole, problems)
    try:
        options = pa.json.ReadOptions(use_threads=False, block_size=1 << 24)
        return pa.json.read_json(io.BytesIO(whole), read_options=options)
    except pa.ArrowInvalid:
        return _read_lines(path, whole, problems)


def _looks_whole(data: bytes) -> bool:
    """Whether each line begins an object and all is UTF-8: what else there may be, Arrow does not always survive."""
    if data.count(b"\n{") + data.startswith(b"{") != data.count(b"\n"):
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read_lines(path: Path, data: bytes, problems: list[str]) -> pa.Table | None:
    """The slow way, for a file with a line that is no JSON object."""
    rows, broken = [], 0
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        problems.append(f"{path}: {broken} of {broken + len(rows)} lines cannot be read; left out")
    try:
        return pa.Table.from_pylist(rows) if rows else None
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        problems.append(f"{path}: {' '.join(str(error).split())[:100]}; left out")
        return None


def _stack(tables: list[pa.Table | None], paths: list[Path], names: list[str], problems: list[str]) -> pd.DataFrame:
    """One table of all trials; a step written twice counts as it was written last."""
    kind = paths[0].name
    kinds: dict[str, str] = {}
    filled = []
    for code, table in enumerate(tables):
        fault = None if table is None else _fault(table, NUMBERS[kind], kinds)
        if fault:
            problems.append(f"{paths[code]}: {fault}; left out")
        elif table is not None:
            filled.append((code, table))
    if not filled:
        return pd.DataFrame(columns=["trial", *NUMBERS[kind]])
    joined = pa.concat_tables([table for _, table in filled], promote_options="permissive")
    codes = np.repeat([code for code, _ in filled], [table.num_rows for _, table in filled])
    out = joined.to_pandas(self_destruct=True, split_blocks=True)
    for column in out.columns[out.dtypes == "str"]:
        out[column] = out[column].astype("category")
    out.insert(0, "trial", pd.Categorical.from_codes(codes, categories=names))
    return out.dropna(subset="step").drop_duplicates(["trial", "step"], keep="last").reset_index(drop=True)


def _fault(table: pa.Table, numbers: list[str], kinds: dict[str, str]) -> str | None:
    """What is wrong with a table of rows: numbers that are missing or none, a column unlike those before (`kinds`)."""
    found = {field.name: _kind(field.type) for field in table.schema}
    wrong = [name for name in numbers if found.get(name) != "number"]
    if wrong:
        return f"no numbers under '{wrong[0]}'"
    for name, kind in found.items():
        if kind != "null" and kinds.setdefault(name, kind) != kind:
            return f"'{name}' holds {kind}s, in other runs {kinds[name]}s"
    return None


def _kind(type_: pa.DataType) -> str:
    if pa.types.is_null(type_):
        return "null"
    return "number" if pa.types.is_integer(type_) or pa.types.is_floating(type_) else str(type_)


def _progress(trials: pd.DataFrame, history: pd.DataFrame, evals: pd.DataFrame) -> pd.DataFrame:
    """What a run without a summary has come to, by the summary's own definitions, from its rows."""
    unended = trials["trial"][trials["status"].isin(["running", "error"])]
    rows = history[history["trial"].isin(unended)].sort_values("step")
    if rows.empty:
        return trials
    groups = rows.groupby("trial", observed=True)
    found = groups[["wall_s", "tokens"]].last().assign(steps=groups.size())
    found["reward_first_10"] = groups["reward"].apply(lambda rewards: rewards.head(10).mean())
    found["reward_last_10"] = groups["reward"].apply(lambda rewards: rewards.tail(10).mean())
    found["accuracy_start"] = evals[evals["step"] == 0].set_index("trial")["accuracy"]
    found["accuracy_best"] = evals.groupby("trial", observed=True)["accuracy"].max()
    out = trials.copy()
    for name in found:
        so_far = out["trial"].map(found[name].to_dict())
        out[name] = out[name].fillna(so_far) if name in out else so_far
    return out


def _decisions(folder: Path, problems: list[str]) -> list[Count]:
    """Rows by trait, bin and decision, over all steps: of a finished run as its summary has them, else counted here."""
    by = (read_mapping(folder / "summary.json", []).get("thrown_away") or {}).get("by")
    if by is None:
        return _count_decisions(folder / "decisions.jsonl", problems)
    cells = [(trait, cell) for trait, found in by.items() for cell in found]
    return [(trait, cell["bin"], name, cell[name]) for trait, cell in cells for name in DECISIONS if cell[name]]


def _count_decisions(path: Path, problems: list[str]) -> list[Count]:
    """The counts of decisions.jsonl, whose cells are [length, reward, difficulty (bins), decision, rows]."""
    counts: Counter[tuple[str, str, str]] = Counter()
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in filter(bytes.strip, lines):
        try:
            row = json.loads(line)
            for *bins, decision, rows in row["cells"]:
                names = [*(BINS[place] for place in bins), str(int(row["lag"]))]
                counts.update({(trait, name, decision): rows for trait, name in zip(TRAITS, names, strict=True)})
        except (ValueError, TypeError, KeyError, IndexError):
            problems.append(f"{path}: holds no cells of decisions, or its last line is cut short; left out from there")
            break
    return [(*key, int(count)) for key, count in counts.items()]
