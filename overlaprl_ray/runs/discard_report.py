"""What was thrown away: who was fresh, stale or discarded, by length, reward, difficulty and lag.

A rule that discards selects. Long completions drift more, hard prompts have other lengths than easy ones: these counts
show what a run did not learn from. A step's cells lie in decisions.jsonl, their sums in summary.json.

    decisions_table("runs/x").groupby(["length", "decision"])["rows"].sum()
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from overlaprl_ray.algorithm.rules import DECISIONS
from overlaprl_ray.workers.cells import TRAITS

BINS = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")


def tidy(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Rows of decisions.jsonl, one per cell: step, lag, length, reward, difficulty (bin 0 to 3), decision, rows."""
    columns = ["step", "lag", *TRAITS, "decision", "rows"]
    return pd.DataFrame([(row["step"], row["lag"], *cell) for row in rows for cell in row["cells"]], columns=columns)


def decisions_table(folder: str | Path) -> pd.DataFrame:
    """The `tidy` table of a run's folder."""
    lines = (Path(folder) / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return tidy(json.loads(line) for line in lines)


def thrown_away(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summary of rows of decisions.jsonl: counts by each trait's bin and by lag, and seconds of generation wasted.

    A batch's seconds count by the share of its rows that was discarded.
    """
    counts: dict[str, dict[str, Counter[str]]] = {name: {} for name in (*TRAITS, "lag")}
    wasted = 0.0
    for row in rows:
        total = sum(cell[-1] for cell in row["cells"])
        discarded = sum(cell[-1] for cell in row["cells"] if cell[-2] == "discard")
        wasted += row["generate_s"] * discarded / max(total, 1)
        for cell in row["cells"]:
            names = [*(BINS[index] for index in cell[:3]), str(row["lag"])]
            for trait, name in zip(counts, names, strict=True):
                counts[trait].setdefault(name, Counter())[cell[-2]] += cell[-1]

    def order(name: str) -> float:
        return BINS.index(name) if name in BINS else float(name)

    by = {
        trait: [{"bin": name, **{kind: found[name][kind] for kind in DECISIONS}} for name in sorted(found, key=order)]
        for trait, found in counts.items()
    }
    return {"generation_s_wasted": wasted, "by": by}
