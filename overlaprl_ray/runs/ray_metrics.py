"""A run's numbers as Ray metrics: Prometheus reads them at Ray's metrics port, and Grafana draws them (grafana.yaml).

The driver's `Metrics` get every row; those of a `Watched` actor tell its current phase. All have the tags run, trial,
mode and seed. `reward` here is `ray_overlaprl_reward` in Prometheus; counters end in `_total`. Ray
exports the values every ten seconds. Gauges end with the run, counters with Ray.

    metrics = Metrics(config)
    metrics.step(row, cells, queue_depth=2)
"""

import functools
import math
import threading
from collections import Counter as Counts
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import config_hash
from overlaprl_ray.workers.results import TRAITS, Cell

NO_TRIAL = "none"  # the tag `trial` of a run outside a sweep
KEEP_EVERY_S = 5.0  # half of Ray's interval between two exports
BOUNDARIES = [base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5)]  # seconds, 1 ms to 500 s
STAGES = ("generate", "reference", "train", "weights", "learner_wait", "generator_wait", "step")  # time/<stage>
PhaseName = Literal["idle", "generate", "score", "train", "publish", "evaluate", "save"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)  # the gauge's value is the index

GAUGES = {  # gauge -> column of metrics.jsonl; a step without a value, as a discarded one, leaves the last one
    "step": "step", "version": "version", "loss": "loss", "grad_norm": "grad_norm", "kl_ref": "kl_ref",
    "entropy": "entropy", "ess": "ess", "reward": "reward", "reward_std": "reward_std",
    "zero_std_groups": "frac_reward_zero_std", "completion_length": "completions/mean_length",
    "clipped_completions": "completions/clipped_ratio", "tokens_per_second": "tokens_per_s",
    "lag": "staleness/lag", "staleness_kl": "staleness/kl", "weight": "staleness/weight",
}  # fmt: skip

Method = TypeVar("Method", bound=Callable[..., Any])


def tags_of(config: ExperimentConfig) -> dict[str, str]:
    """A run's tags, from its settings alone: the run is its folder, or its sweep's, and the trial its folder there."""
    folder = Path(config.output.dir or "run")
    in_sweep = folder.parent.name == "trials" and folder.name == config_hash(config)  # as sweeps name their trials
    return {
        "run": _ascii(folder.parent.parent.name if in_sweep else folder.name),
        "trial": _ascii(folder.name) if in_sweep else NO_TRIAL,
        "mode": config.pipeline.mode,
        "seed": str(config.seed),
    }


def _ascii(name: str) -> str:
    """Ray accepts only ASCII in tags."""
    return name.encode("ascii", "backslashreplace").decode()


class Metrics:
    """One run's Ray metrics in this process, each created at its first value.

    Ray drops a gauge some twenty seconds after it was last set, so a thread keeps setting them until `close`. `before`
    is the last row that an earlier process wrote of the same run.
    """

    def __init__(self, config: ExperimentConfig, before: dict[str, Any] | None = None, **tags: str):
        self.tags = {**tags_of(config), **tags}
        self.before = before or {"tokens": 0, "samples": 0}
        self.metrics: dict[str, Any] = {}
        self.gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.lock = threading.Lock()
        self.closed = threading.Event()
        threading.Thread(target=self._keep, daemon=True).start()

    def set(self, name: str, value: float | None, **tags: str) -> None:
        """Set a gauge. None and what metrics.jsonl writes as null change nothing."""
        if value is not None and math.isfinite(value):
            with self.lock:
                self.gauges[name, tuple(tags.items())] = value
                self.metric(Gauge, name, tags).set(value, tags=tags)

    def add(self, name: str, value: float, **tags: str) -> None:
        """Add to a counter."""
        if value > 0:  # Ray refuses zero
            self.metric(Counter, name, tags).inc(value, tags=tags)

    def step(self, row: dict[str, Any], cells: Sequence[Cell] = (), queue_depth: int = 0) -> None:
        """One row of metrics.jsonl, the cells of its row of decisions.jsonl, and how many rollouts wait or train."""
        for name, column in GAUGES.items():
            self.set(name, row[column])
        self.set("queue_depth", queue_depth)
        for column, value in row.items():
            if column.startswith("memory/"):
                self.set("memory_gb", value, actor=column.removeprefix("memory/").removesuffix("_gb"))
        self.add("steps", 1)
        self.add("faults", row["faults"])
        self.add("decisions", 1, decision=row["staleness/decision"])
        for total in ("tokens", "samples"):
            self.add(total, row[total] - self.before[total])
        for stage in STAGES:
            if (seconds := row[f"time/{stage}"]) is not None:
                tags = {"stage": stage}
                self.add("stage_seconds", seconds, **tags)  # exact; the histogram's sum is rebuilt from buckets
                histogram = self.metric(Histogram, "stage_duration_seconds", tags, boundaries=BOUNDARIES)
                histogram.observe(seconds, tags=tags)
        counts: Counts[tuple[str, str, int]] = Counts()
        for *quarters, decision, count in cells:
            for trait, quarter in zip(TRAITS, quarters, strict=True):
                counts[decision, trait, quarter] += count
        for (decision, trait, quarter), count in counts.items():
            self.add("rows", count, decision=decision, trait=trait, quarter=str(quarter))
        self.before = row

    def close(self) -> None:
        """Let the gauges end."""
        self.closed.set()

    def metric(self, kind: Callable[..., Any], name: str, tags: dict[str, str], **options: Any) -> Any:
        """Ray's metric of that name."""
        if name not in self.metrics:
            text = f"{GAUGES[name]} in metrics.jsonl" if name in GAUGES else ""
            metric = kind(f"overlaprl_{name}", description=text, tag_keys=(*self.tags, *tags), **options)
            self.metrics[name] = metric.set_default_tags(self.tags)
        return self.metrics[name]

    def _keep(self) -> None:
        while not self.closed.wait(KEEP_EVERY_S):
            with self.lock:
                for (name, tags), value in self.gauges.items():
                    self.metrics[name].set(value, tags=dict(tags))


class Watched:
    """What every watched actor has: its name as the prefix of its log lines, and the gauge `phase`."""

    def __init__(self, config: ExperimentConfig):
        self.name = str(ray.get_runtime_context().get_actor_name())
        self.metrics = Metrics(config, actor=_ascii(self.name.rpartition("/")[2]))
        self.phase: PhaseName = "idle"
        self.enter("idle")

    def __repr__(self) -> str:
        return self.name  # Ray's prefix for log lines

    def enter(self, phase: PhaseName) -> PhaseName:
        """Begin a phase; returns the one before."""
        before, self.phase = self.phase, phase
        self.metrics.set("phase", PHASES.index(phase))
        return before


def during(phase: PhaseName) -> Callable[[Method], Method]:
    """Decorates a method of a `Watched` actor: the actor is in this phase while the method runs."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def inside(actor: Watched, *args: Any, **kwargs: Any) -> Any:
            before = actor.enter(phase)
            try:
                return method(actor, *args, **kwargs)
            finally:
                actor.enter(before)

        return cast(Method, inside)

    return decorate
