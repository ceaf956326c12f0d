"""The measurements: every arm once, then every arm again, each in a fresh process; what is made of their traces.

Speed is taken over the steps between the first `warm_up` and the last one: at the start memory is allocated and the
pipeline fills; while the last batch is trained on, nothing is generated any more, which would flatter an overlapping
arm.

    found = run_bench(Plan("tiny", config, arms, repeats=3), Path("runs/peers"), Console())
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.grpo import TINY
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.tiny import tiny_folder
from overlaprl_ray.peers.arms import Arm, Job, Track, config_of, never_ending
from overlaprl_ray.peers.measure import measure
from overlaprl_ray.peers.report import write_report
from overlaprl_ray.runs.environment import environment
from overlaprl_ray.runtime.preflight import preflight

SPEED = ("tiny", "smollm2")  # works with a fixed number of tokens
WORKS = (*SPEED, "target", "curve")
FEWEST = 3  # steps between warm-up and the last one


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured. `every` and `target` belong to the works `target` and `curve`."""

    work: str
    config: ExperimentConfig
    arms: Sequence[Arm]
    repeats: int = 3
    warm_up: int = 5
    every: int | None = None
    target: float | None = None


def check_plan(plan: Plan) -> None:
    """Raise `ConfigError` for what would only show after minutes."""
    config = plan.config
    name = config.grpo.model_name
    if plan.work in SPEED and name != TINY and not Path(name).expanduser().is_dir():
        raise ConfigError(f"grpo.model_name = '{name}': no folder; {plan.work} needs a local copy of the model")
    preflight(config)
    if any(arm.kind == "trl" for arm in plan.arms):
        from overlaprl_ray.peers.trl_arm import trl_settings  # TRL is an extra, and takes seconds to import

        for arm in plan.arms:
            trl_settings(config, arm.bf16, config.grpo.num_steps)
    need = plan.warm_up + FEWEST + 1
    if plan.work in SPEED and config.grpo.num_steps < need:
        raise ConfigError(
            f"grpo.num_steps = {config.grpo.num_steps}: {need} are the fewest with --warm-up {plan.warm_up}; raise it"
        )
    if plan.work not in SPEED and config.pipeline.schedule != "exact":
        raise ConfigError("pipeline.schedule = latest: an evaluated run must be the timed one again; use exact")


def run_bench(plan: Plan, folder: Path, console: Console) -> dict[str, Any]:
    """Measure; returns (and writes, anew after every process) what peers.json holds."""
    config = with_model(plan, folder)
    runs: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for repeat in range(1, plan.repeats + 1):
        seconds: float | None = None  # that TRL gets in `curve`: as many as our first arm took, so ours come first
        for arm in sorted(plan.arms, key=lambda arm: arm.kind == "trl") if plan.work == "curve" else plan.arms:
            seed = config.seed + repeat - 1
            job = Job(arm, config_of(arm, config, seed), plan.every, plan.target, None)
            if plan.work == "curve" and arm.kind == "trl" and seconds is not None:
                job = _as_long(job, seconds)
            console.print(f"{arm.label}, repeat {repeat} of {plan.repeats}", highlight=False)
            where = folder / f"r{repeat}-{re.sub(r'[^A-Za-z0-9]+', '-', arm.label).strip('-')}"
            track, memory = measure(job, where)
            if arm.kind == "own" and seconds is None:
                seconds = track.ends[-1]
            about = {"label": arm.label, "kind": arm.kind, "threads": arm.threads, "repeat": repeat, "seed": seed}
            figures = figures_of(track, config.grpo.batch_rows, plan)
            runs.append({**about, **figures, **dataclasses.asdict(memory), "curve": track.curve, "folder": where.name})
            console.print("  " + line_of(runs[-1]), highlight=False)
            found = {
                "work": plan.work,
                "config": config.model_dump(mode="json"),
                "repeats": plan.repeats,
                "warm_up": plan.warm_up,
                "every": plan.every,
                "target": plan.target,
                "environment": environment_with_trl(),
                "arms": compare(runs),
                "runs": runs,
            }
            write_report(folder, found)
    return found


def with_model(plan: Plan, folder: Path) -> ExperimentConfig:
    """The configuration with its model as a folder that all arms load; works of fixed length get one without an end."""
    config = plan.config
    name = config.grpo.model_name
    if name == TINY:
        torch.set_num_threads(1)  # its bits depend on them, as do all arms on these
        name = str(tiny_folder(config.model.tiny, preflight(config).task.train))
    if plan.work in SPEED:
        name = str(never_ending(name, folder / "model"))
    return config.model_copy(update={"grpo": config.grpo.model_copy(update={"model_name": name})})


def _as_long(job: Job, seconds: float) -> Job:
    """For so many seconds, however many steps these are: twenty times ours is more than any peer makes of them."""
    grpo = job.config.grpo.model_copy(update={"num_steps": 20 * job.config.grpo.num_steps})
    return dataclasses.replace(job, config=job.config.model_copy(update={"grpo": grpo}), seconds=seconds)


def environment_with_trl() -> dict[str, Any]:
    """Versions, hardware, commit; the peer's version too."""
    found = environment()
    try:
        found["versions"]["trl"] = version("trl")
    except ModuleNotFoundError:  # PackageNotFoundError: only our own arms are measured
        found["versions"]["trl"] = None
    return found


# ---- from traces to numbers ----


def figures_of(track: Track, rows: int, plan: Plan) -> dict[str, Any]:
    """A run's figures: seconds per step (median), samples and tokens per second, reward, accuracy, time to target.

    A run too short for a steady part is taken whole, from its first step's end.
    """
    first, last = plan.warm_up, len(track.ends) - 1  # steps first+1 .. last are counted
    if last - first < 1:
        first, last = 0, len(track.ends)
    ends = [0.0, *track.ends][first : last + 1]
    seconds = ends[-1] - ends[0]
    accuracies = [accuracy for _, accuracy in track.evaluations]
    return {
        "steps": len(track.ends),
        "step_s": median(after - before for before, after in itertools.pairwise(ends)),
        "samples_per_s": rows * (len(ends) - 1) / seconds,
        "tokens_per_s": sum(track.tokens[first:last]) / seconds,
        "reward_first": track.rewards[0],
        "reward_last": track.rewards[-1],
        "train_s": track.ends[-1],
        "accuracy_start": accuracies[0] if accuracies else None,
        "accuracy_best": max(accuracies, default=None),
        "accuracy_final": accuracies[-1] if accuracies else None,
        "seconds_to_target": track.seconds_to(plan.target) if plan.target is not None else None,
    }


MEDIANS = ("step_s", "samples_per_s", "tokens_per_s", "rss_gb", "pss_gb", "seconds_to_target", "accuracy_start",
           "accuracy_best", "accuracy_final", "train_s")  # fmt: skip


def compare(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per arm: medians with ranges; `speed` and `to_target` are ratios to TRL's best arm in that figure.

    The ratio is of medians, its range that of the repeats paired where both have the figure. A run that never reached
    the target ranks behind all that did: the median is None only if it falls on such a run, and so is the maximum.
    """
    by_label = {run["label"]: [r for r in runs if r["label"] == run["label"]] for run in runs}
    out = []
    for label, own in by_label.items():
        entry: dict[str, Any] = {"label": label, "kind": own[0]["kind"], "threads": own[0]["threads"], "runs": len(own)}
        for name in MEDIANS:
            entry[name], entry[f"{name}_min"], entry[f"{name}_max"] = _spread([run[name] for run in own])
        out.append({**entry, **_ratio("speed", "samples_per_s", own, by_label, max),
                    **_ratio("to_target", "seconds_to_target", own, by_label, min)})  # fmt: skip
    return out


def _ratio(
    name: str,
    figure: str,
    own: Sequence[dict[str, Any]],
    by_label: dict[str, list[dict[str, Any]]],
    best: Callable[..., Any],
) -> dict[str, Any]:
    """`own`'s figure over that of TRL's best arm; None where there is none, or it is 0 (there from the start)."""
    peers = [runs for runs in by_label.values() if runs[0]["kind"] == "trl"]
    peers = [runs for runs in peers if _spread([run[figure] for run in runs])[0] is not None]
    middle = _spread([run[figure] for run in own])[0]
    peer = best(peers, key=lambda runs: _spread([run[figure] for run in runs])[0], default=[])
    theirs = {run["repeat"]: run[figure] for run in peer}
    typical = _spread(list(theirs.values()))[0] if theirs else None
    if middle is None or not typical:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    both = [(run[figure], theirs.get(run["repeat"])) for run in own]
    pairs = [ours / other for ours, other in both if ours is not None and other]
    return {
        name: middle / typical,
        f"{name}_min": min(pairs, default=None),
        f"{name}_max": max(pairs, default=None),
    }


def _spread(values: Sequence[float | None]) -> tuple[Any, Any, Any]:
    """Median, least, most; a missing value counts as more than any other, and what falls on one is None."""
    ranked = [math.inf if value is None else value for value in values]
    median_, least, most = (None if math.isinf(v) else v for v in (median(ranked), min(ranked), max(ranked)))
    return median_, least, most


def line_of(run: dict[str, Any]) -> str:
    """A run in a line, for the terminal."""
    text = f"{run['step_s']:.3f} s per step, {run['samples_per_s']:.2f} samples/s, {run['pss_gb']:.2f} GB"
    if run["accuracy_final"] is not None:
        text += f", accuracy {run['accuracy_start']:.3f} to {run['accuracy_final']:.3f} in {run['train_s']:.0f} s"
    return text
