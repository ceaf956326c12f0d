"""What workers tell the driver: numbers, times and counts, no tensors. Importing this costs nothing.

StepResult and Evaluation are written down by runs/recorder.py; workers/metrics.py and cells.py compute their contents.
"""

import dataclasses
from typing import Any, NamedTuple

from overlaprl_ray.rollout import Span

TRAITS = ("length", "reward", "difficulty")

Cell = tuple[int, int, int, str, int]  # bins of length, reward, difficulty; decision; rows


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A finished step."""

    step: int
    metrics: dict[str, Any]
    spans: dict[str, Span]  # load, generate, reference, train, publish
    memory_gb: dict[str, float]
    samples: list[dict[str, Any]]  # for completions.jsonl
    weights_step: int
    cells: list[Cell]  # for decisions.jsonl
    fault: str | None  # why the batch was skipped, where `pipeline.on_fault` has it so
    floor: float | None  # KL of the run's first batch, numerical mismatch alone, nats per token


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Greedy held-out accuracy of the policy after a step."""

    step: int
    version: int
    accuracy: float
    n: int
    span: Span


class Report(NamedTuple):
    """What happened in a stream while it made a batch."""

    evaluations: list[Evaluation]
    states: dict[int, dict[str, Any]]  # of the stream, by the step whose weights were taken over just then
