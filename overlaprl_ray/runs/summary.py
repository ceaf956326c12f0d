"""A run in one record, computed from its rows; and what it did not learn from.

summarize(config, rows, evaluations, wall_s=61.2, status="done", cores=2)["accuracy_final"]
discard_report(decisions)["by"]["length"]    # rows of decisions.jsonl
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.staleness import DECISIONS
from overlaprl_ray.runs.timeline import WARM_UP
from overlaprl_ray.workers.results import TRAITS, Evaluation

STAGES = ("generate", "reference", "train", "weights", "publish")  # publishing is a part of `weights`
BINS = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")


def bounds(stages: dict[str, float], mode: str, lag: int, cores: int | None) -> dict[str, float]:
    """The least seconds that a steady step takes: `serial` one stage after another, `bound` with perfect overlap.

    Batch k+1 cannot start before step k-lag is done, hence serial / (lag + 1). `cores` is how many stages a CPU can
    run at once; None on a GPU, where `bound` assumes no contention and is no physical limit.
    """
    publish = stages["publish"]  # by the learner; the rest of `weights` is loading, by the generator
    serial = sum(stages.values()) - publish
    learner = stages["train"] + publish + (0.0 if mode == "overlap" else stages["reference"])
    reference = stages["reference"] if mode == "overlap" else 0.0
    lanes = (stages["weights"] - publish + stages["generate"], reference, learner)
    return {"serial": serial, "bound": max(*lanes, serial / (lag + 1), serial / cores if cores else 0.0)}


def summarize(
    config: ExperimentConfig,
    rows: list[dict[str, Any]],
    evaluations: list[Evaluation],
    wall_s: float,
    status: str,
    cores: int | None,
) -> dict[str, Any]:
    """summary.json; what the run did not reach is None. `cores` as in `bounds`."""
    accuracies = [evaluation.accuracy for evaluation in evaluations]
    steady = rows[WARM_UP:] or rows
    seconds = sum(row["time/step"] for row in steady)
    stages = {stage: fmean(row.get(f"time/{stage}") or 0.0 for row in steady) for stage in STAGES} if rows else None
    rewards = [row["reward"] for row in rows if row["reward"] is not None]  # None: nobody judged the batch
    decisions = Counter(row["staleness/decision"] for row in rows)
    kls = [row["staleness/kl"] for row in rows if row["staleness/kl"] is not None]
    return {
        "status": status,
        "mode": config.pipeline.mode,
        "lag": config.lag,
        "rule": config.rule,
        "seed": config.seed,
        "steps": len(rows),
        "version": rows[-1]["version"] if rows else 0,
        "accuracy_start": accuracies[0] if accuracies else None,
        "accuracy_final": accuracies[-1] if status == "done" and accuracies else None,
        "accuracy_best": max(accuracies, default=None),
        "reward_first_10": fmean(rewards[:10]) if rewards else None,
        "reward_last_10": fmean(rewards[-10:]) if rewards else None,
        "steps_per_s": len(steady) / seconds if seconds else None,
        "tokens": rows[-1]["tokens"] if rows else 0,
        "samples": rows[-1]["samples"] if rows else 0,
        "wall_s": wall_s,
        "stages_s": stages,
        **(bounds(stages, config.pipeline.mode, config.lag, cores) if stages else {}),
        "decisions": {name: decisions[name] for name in DECISIONS},
        "staleness_kl_mean": fmean(kls) if kls else None,
        "staleness_kl_max": max(kls, default=None),
    }


def discard_report(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fresh, stale and discarded rows by each trait's bin and by lag, and the seconds of generation wasted.

    A rule that discards also selects: long completions drift more, and hard prompts differ in length from easy ones.
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
