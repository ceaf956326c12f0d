"""A run in one record, computed from its rows.

summarize(config, rows, evaluations, wall_s=61.2, status="done", cores=2)["accuracy_final"]
"""

from collections import Counter
from statistics import fmean
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.workers.metrics import Evaluation

WARM_UP = 5  # steps left out of speeds: the first ones allocate, compile kernels and fill the pipeline
STAGES = ("generate", "reference", "train", "weights", "publish")  # publishing is a part of `weights`


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
        "reward_first_10": fmean(row["reward"] for row in rows[:10]) if rows else None,
        "reward_last_10": fmean(row["reward"] for row in rows[-10:]) if rows else None,
        "steps_per_s": len(steady) / seconds if seconds else None,
        "tokens": rows[-1]["tokens"] if rows else 0,
        "samples": rows[-1]["samples"] if rows else 0,
        "wall_s": wall_s,
        "stages_s": stages,
        **(bounds(stages, config.pipeline.mode, config.lag, cores) if stages else {}),
        "decisions": {name: decisions[name] for name in ("fresh", "stale", "discard")},
        "staleness_kl_mean": fmean(kls) if kls else None,
        "staleness_kl_max": max(kls, default=None),
    }
