"""What a run did not learn from: fresh, stale and discarded rows by length, reward, difficulty and lag.

A rule that discards also selects: long completions drift more, and hard prompts differ in length from easy ones.

    discard_report(rows)["by"]["length"]    # rows of decisions.jsonl; the same is in summary.json as `thrown_away`
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from overlaprl_ray.config.staleness import DECISIONS
from overlaprl_ray.workers.results import TRAITS

BINS = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")


def discard_report(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by each trait's bin and by lag, and the seconds of generation wasted.

    A batch's seconds count by the share of its rows that was discarded.
    """
    counts: dict[str, Counter[tuple[int, str]]] = {name: Counter() for name in (*TRAITS, "lag")}
    wasted = 0.0
    for row in rows:
        total = sum(cell[-1] for cell in row["cells"])
        discarded = sum(cell[-1] for cell in row["cells"] if cell[-2] == "discard")
        wasted += row["generate_s"] * discarded / max(total, 1)
        for *bins, decision, count in row["cells"]:
            for name, place in zip(counts, [*bins, row["lag"]], strict=True):
                counts[name][place, decision] += count
    return {"generation_s_wasted": wasted, "by": {name: _table(name, found) for name, found in counts.items()}}


def _table(name: str, counts: Counter[tuple[int, str]]) -> list[dict[str, Any]]:
    """A row per bin that occurs, in order."""
    bins = sorted({place for place, _ in counts})
    label = str if name == "lag" else BINS.__getitem__
    return [{"bin": label(place), **{kind: counts[place, kind] for kind in DECISIONS}} for place in bins]
