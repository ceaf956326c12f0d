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
import torch
from torch import Tensor

from overlaprl_ray.rollout import Rollout
from overlaprl_ray.rules import DECISIONS

BINS = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")
TRAITS = ("length", "reward", "difficulty")

Cell = tuple[int, int, int, str, int]  # bins of length, reward, difficulty; decision; rows


def cells_of(rollout: Rollout, decision: Tensor, group_size: int, max_new_tokens: int) -> list[Cell]:
    """A batch's rows counted by quarter of each trait and decision; `decision` (B,) indexes `DECISIONS`.

    Traits, each from 0 to 1: completion length / max_new_tokens; reward (clipped); difficulty, the mean first reward of
    the prompt's group (0: nobody solved it).
    """
    first = next(iter(rollout.reward_parts.values())).double()
    difficulty = first.reshape(-1, group_size).mean(dim=1).repeat_interleave(group_size)
    length = rollout.completion_mask.sum(dim=1).double() / max_new_tokens
    bins = [(4 * trait).floor().clamp(0, 3).long() for trait in (length, rollout.rewards.double(), difficulty)]
    rows = torch.stack([*bins, decision.long()], dim=1).tolist()
    return [(a, b, c, DECISIONS[d], count) for (a, b, c, d), count in sorted(Counter(map(tuple, rows)).items())]


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
