"""A run's numbers as Ray metrics: Prometheus reads them at Ray's metrics port, Grafana draws them (watching/).

`RunMetrics` lives in the driver and is handed every row; a `Watched` actor says what it does just now. All carry the
tags run, trial, mode and seed; a metric called `reward` here is `ray_overlaprl_reward` in Prometheus, and counters end
in `_total`. Ray sends its values to the port every ten seconds. Gauges end with the run, counters with Ray.

    metrics = RunMetrics(config)
    metrics.step(row, cells, queue_depth=2)
"""

import functools
import math
import threading
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.workers.cells import TRAITS, Cell

PREFIX = "overlaprl_"
KEEP_EVERY_S = 5.0  # half of Ray's interval between two exports
TAGS = ("run", "trial", "mode", "seed")
NO_TRIAL = "none"  # the tag `trial` of a run that belongs to no sweep

# metric -> (column of metrics.jsonl, what it is). A step without a value, as a discarded one, leaves the last one.
GAUGES = {
    "step": ("step", "Steps done"),
    "version": ("version", "Optimizer updates done"),
    "reward": ("reward", "Mean sampled reward of the step's batch"),
    "reward_std": ("reward_std", "Mean standard deviation of rewards within a group"),
    "zero_std_groups": ("frac_reward_zero_std", "Share of groups whose rewards are all equal: no signal"),
    "completion_length": ("completions/mean_length", "Mean completion length, tokens"),
    "clipped_completions": ("completions/clipped_ratio", "Share of completions cut off at the longest length"),
    "loss": ("loss", "Loss of the step's updates"),
    "kl_ref": ("kl_ref", "KL to the reference model, nats per token"),
    "entropy": ("entropy", "Entropy of the policy, nats per token"),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping"),
    "ess": ("ess", "Effective sample size of the importance ratios, share of the batch"),
    "lag": ("staleness/lag", "Optimizer updates between a batch's generation and its training"),
    "staleness_kl": ("staleness/kl", "KL of the policy that generated a batch to the one trained on it, nats"),
    "weight": ("staleness/weight", "Mean weight that the staleness rule gave the batch"),
    "tokens_per_second": ("tokens_per_s", "Generated tokens per second of the step"),
}
STAGES = ("generate", "reference", "train", "weights", "learner_wait", "generator_wait", "step")  # time/<stage>
BOUNDARIES = [base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5)]  # seconds, 1 ms to 500 s

P = ParamSpec("P")
T = TypeVar("T")
PhaseName = Literal["idle", "generate", "score", "train", "publish", "evaluate", "save"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)  # a phase's number is its place here


def tags_of(config: ExperimentConfig) -> dict[str, str]:
    """A run's tags, from its settings alone: the run is its folder, or its sweep's, and the trial its place therein."""
    folder = Path(config.output.dir or "run")
    in_sweep = folder.parent.name == "trials"
    return {
        "run": _ascii(folder.parent.parent.name if in_sweep else folder.name),
        "trial": _ascii(folder.name) if in_sweep else NO_TRIAL,
        "mode": config.pipeline.mode,
        "seed": str(config.seed),
    }


def _ascii(name: str) -> str:
    """As Ray's metrics want their tags."""
    return name.encode("ascii", "backslashreplace").decode()


class Gauges:
    """Gauges that stay: Ray drops one from its port some twenty seconds after it was last set, so it is set again."""

    def __init__(self) -> None:
        self.values: dict[tuple[Gauge, tuple[tuple[str, str], ...]], float] = {}
        self.lock = threading.Lock()
        self.closed = threading.Event()
        threading.Thread(target=self._keep, daemon=True).start()

    def set(self, gauge: Gauge, value: float | None, **tags: str) -> None:
        """None, or what metrics.jsonl writes as null, is no change."""
        if value is not None and math.isfinite(value):
            with self.lock:
                self.values[gauge, tuple(tags.items())] = value
                gauge.set(value, tags=tags)

    def _keep(self) -> None:
        while not self.closed.wait(KEEP_EVERY_S):
            with self.lock:
                for (gauge, tags), value in self.values.items():
                    gauge.set(value, tags=dict(tags))


class RunMetrics:
    """The driver's metrics. `before` is the last row of the part of the run that an earlier process did."""

    def __init__(self, config: ExperimentConfig, before: dict[str, Any] | None = None):
        tags = tags_of(config)

        def make(kind: Callable[..., Any], name: str, text: str, *keys: str, **options: Any) -> Any:
            metric = kind(PREFIX + name, description=text, tag_keys=(*TAGS, *keys), **options)
            return metric.set_default_tags(tags)

        self.before = before or {"tokens": 0, "samples": 0}
        self.kept = Gauges()
        self.gauges = {column: make(Gauge, name, text) for name, (column, text) in GAUGES.items()}
        self.accuracy = make(Gauge, "accuracy", "Greedy accuracy on held-out problems")
        self.queue_depth = make(Gauge, "queue_depth", "Rollouts that exist and are not yet trained on")
        self.memory = make(Gauge, "memory_gb", "Memory of an actor, GB", "actor")
        self.steps = make(Counter, "steps", "Steps done by this process")
        self.tokens = make(Counter, "tokens", "Tokens generated")
        self.samples = make(Counter, "samples", "Completions generated")
        self.faults = make(Counter, "faults", "Batches skipped because of a fault")
        self.decisions = make(Counter, "decisions", "Steps by the staleness rule's decision", "decision")
        self.rows = make(Counter, "rows", "Completions by decision and by quarter of a trait, 0 to 3, lowest first",
                         "decision", "trait", "quarter")  # fmt: skip
        # Ray rebuilds a histogram's sum from the middles of its buckets; the counter beside it is exact
        self.stage_seconds = make(Counter, "stage_seconds", "Seconds spent per stage, or waited", "stage")
        self.durations = make(Histogram, "stage_duration_seconds", "Duration of a stage, seconds", "stage",
                              boundaries=BOUNDARIES)  # fmt: skip

    def step(self, row: dict[str, Any], cells: Sequence[Cell] = (), queue_depth: int = 0) -> None:
        """One row of metrics.jsonl, the cells of its row of decisions.jsonl, and how many rollouts wait or train."""
        for column, gauge in self.gauges.items():
            self.kept.set(gauge, row[column])
        self.kept.set(self.queue_depth, queue_depth)
        self.steps.inc()
        self.decisions.inc(tags={"decision": row["staleness/decision"]})
        for counter, column in ((self.tokens, "tokens"), (self.samples, "samples")):
            _add(counter, row[column] - self.before[column])
        _add(self.faults, row.get("faults", 0))
        for stage in STAGES:
            if (seconds := row[f"time/{stage}"]) is not None:
                _add(self.stage_seconds, seconds, {"stage": stage})
                self.durations.observe(seconds, tags={"stage": stage})
        for name, value in row.items():
            if name.startswith("memory/"):
                self.kept.set(self.memory, value, actor=name.removeprefix("memory/").removesuffix("_gb"))
        tally: Tally[tuple[str, str, int]] = Tally()
        for *quarters, decision, count in cells:
            for trait, quarter in zip(TRAITS, quarters, strict=True):
                tally[decision, trait, quarter] += count
        for (decision, trait, quarter), count in tally.items():
            _add(self.rows, count, {"decision": decision, "trait": trait, "quarter": str(quarter)})
        self.before = row

    def evaluation(self, step: int, accuracy: float) -> None:
        """A held-out evaluation of the policy after a step."""
        self.kept.set(self.accuracy, accuracy)

    def close(self) -> None:
        """Let the gauges end."""
        self.kept.closed.set()


def _add(counter: Counter, value: float, tags: dict[str, str] | None = None) -> None:
    if value > 0:  # Ray refuses to add nothing
        counter.inc(value, tags=tags or {})


class Watched:
    """What actors that can be watched have in common: their name before their log lines, and the gauge `phase`."""

    def __init__(self, config: ExperimentConfig):
        self.name = str(ray.get_runtime_context().get_actor_name())
        text = f"What an actor does, as a number from 0: {', '.join(PHASES)}"
        self.gauge = Gauge(PREFIX + "phase", text, (*TAGS, "actor"))
        self.gauge.set_default_tags({**tags_of(config), "actor": _ascii(self.name.rpartition("/")[2])})
        self.kept = Gauges()
        self.phase: PhaseName = "idle"
        self.enter("idle")

    def __repr__(self) -> str:
        return self.name  # what Ray puts before log lines

    def enter(self, phase: PhaseName) -> PhaseName:
        """Begin a phase; returns the one before."""
        before, self.phase = self.phase, phase
        self.kept.set(self.gauge, PHASES.index(phase))
        return before


def during(phase: PhaseName) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a method of a `Watched` actor, which is in this phase while the method runs."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            actor: Watched = args[0]  # type: ignore[assignment]
            before = actor.enter(phase)
            try:
                return method(*args, **kwargs)
            finally:
                actor.enter(before)

        return inside

    return decorate
