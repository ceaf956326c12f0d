"""This project's arm: a run as `train` makes it, timed without evaluations.

Where accuracies over time are wanted, the same run is made once more with evaluations. The schedule is exact, so its
weights are those of the timed run bit for bit; that rewards and losses are equal is checked, not assumed.

    track = run_own(job, Path("runs/peers/r1-overlap"))
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.peers.arms import Job, Track
from overlaprl_ray.runs.timeline import load_trace
from overlaprl_ray.runtime.train import ray_running, train

SAME = ("reward", "loss", "tokens")


def run_own(job: Job, folder: Path) -> Track:
    """Train in a Ray of this process's own. Raises `RunError` where the evaluated run is not the timed one."""
    evaluations: list[tuple[int, float]] = []
    with ray_running():
        rows = _train(job.config, folder / "timed", every=0)
        if job.every:
            again = _train(job.config, folder / "evaluated", job.every)
            for row, other in zip(rows, again, strict=True):
                if [row[name] for name in SAME] != [other[name] for name in SAME]:
                    raise RunError(f"step {row['step']}: the evaluated run is not the timed one; use schedule exact")
            evaluations = [(e["step"], e["accuracy"]) for e in _jsonl(folder / "evaluated" / "eval.jsonl")]
    steps = load_trace(folder / "timed" / "timeline.json").steps
    zero = steps[0].spans["load"][0]
    tokens = [row["tokens"] for row in rows]
    return Track(
        ends=[step.spans["train"][1] - zero for step in steps],
        tokens=[now - before for now, before in zip(tokens, [0, *tokens], strict=False)],
        rewards=[row["reward"] for row in rows],
        evaluations=evaluations,
    )


def _train(config: ExperimentConfig, folder: Path, every: int) -> list[dict[str, Any]]:
    output = config.output.model_copy(update={"dir": str(folder), "eval_every": every})
    train(config.model_copy(update={"output": output}), Console(quiet=True))
    return _jsonl(folder / "metrics.jsonl")


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
