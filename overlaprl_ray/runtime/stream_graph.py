"""The graph of a stream's calls: each call of the generator gets the weights that can be due in it, as references.

                 weights after steps i-1-lag ... i-1          scores
    batch(i) <---------------------------- train(j)  <-------- score(i)      for every batch i

A call also reports: the evaluations that were due with weights it took over, and the stream's state where its caches
were computed anew. With that state, and the batches that had ended before, the checkpoint of a step is complete. After
the death of an actor all go back to the newest one; repeated calls follow the ticks that are on record.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from overlaprl_ray.algorithm.stream import ticks_of
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.runs.checkpoint import Checkpoint, clear_scratch
from overlaprl_ray.runtime.graph import Graph
from overlaprl_ray.runtime.queue import Ticket
from overlaprl_ray.runtime.supervisor import Actors
from overlaprl_ray.workers.results import Evaluation, Report, StepResult


class StreamGraph(Graph):
    """One generator, whose calls are a stream's."""

    def __init__(self, config: ExperimentConfig, actors: Actors, folder: Path, start: Checkpoint | None = None):
        self.ticks: dict[int, int] = {}  # step -> tick at which its weights were taken over, of finished steps' batches
        super().__init__(config, actors, folder, start)
        self.due = []  # the generator evaluates by itself

    def submit_end(self) -> None:
        """Submit the evaluations that remain after the last batch."""
        generator = self.actors.generators[0]
        self.end.call("report", generator.end, self.last, self._weights_since(self.schedule.oldest_step(self.last + 1)))

    def finish(self, result: StepResult) -> None:
        """The oldest batch is trained on, with this result."""
        self.ticks |= ticks_of(result.metrics["weights_ticks"])
        super().finish(result)

    def report(self, ticket: Ticket) -> list[Evaluation]:
        """The evaluations made while a batch was; checkpoints that wait for the state of then are completed."""
        if ticket.calls.get("report") is None:
            return []
        report: Report = self.actors.fetch(ticket.calls.pop("report"), f"the report on batch {ticket.batch}")
        for step, state in report.states.items():
            if step in self.since_base and self._has_checkpoint(step):
                begun = self.since_base[step]
                shares = [share for batch in range(step + 1, ticket.batch) for share in self.since_base[batch].shares]
                complete = self.actors.learner.complete_stream_checkpoint
                begun.call("complete", complete, begun.calls["begin"], self.folder, step, state, *shares)
        return report.evaluations

    def _generate(self, ticket: Ticket) -> None:
        if ticket.calls.get("generate-0") is None:
            call = self.actors.generators[0].batch.options(num_returns=2)
            weights = self._weights_since(ticket.weights_step)
            ticket.calls["generate-0"], ticket.calls["report"] = call.remote(ticket.batch, weights)

    def _weights_since(self, step: int) -> dict[int, Any]:
        """References to the weights after this step and later ones that were submitted."""
        return {s: weights for s, weights in self.weights.items() if s >= step}

    # ---- checkpoints ----

    def _has_checkpoint(self, step: int) -> bool:
        return super()._has_checkpoint(step) and step < self.last  # nobody takes over the last weights at a tick

    def _complete_checkpoints(self, ticket: Ticket) -> None:
        """Not with a batch, but once the stream's state is reported."""

    def whole_checkpoints(self, wait: bool) -> Iterator[tuple[int, int]]:
        """(step, step) of each checkpoint that is written completely; with `wait`, the others are given up."""
        for step in filter(self._has_checkpoint, list(self.since_base)):
            written = self.since_base[step].calls.get("complete")
            if not wait and (written is None or not ray.wait([written], timeout=0)[0]):
                return
            if written is None:
                written = self.actors.learner.abandon_checkpoint.remote(self.folder, step)
                self.actors.fetch(written, f"checkpoint step-{step} to be given up")
            else:
                self.actors.fetch(written, f"checkpoint step-{step}")
                yield step, step

    # ---- after a death ----

    def resubmit(self, new_learner: bool) -> list[Ticket]:
        """Start again from the base, with new workers; returns the steps repeated."""
        clear_scratch(self.folder)
        self.weights, self.restored = {}, {}
        self._load_base()
        repeated = [ticket for ticket in self.since_base.values() if ticket.result]
        previous = None
        for ticket in [*repeated, *self.queue]:
            held = self.restored.pop(ticket.batch, None)
            ticket.calls = held.calls if held else {}
            self._make_calls(ticket, previous)
            previous = ticket
        self.end.calls = {}
        return repeated

    def _load_base(self) -> None:
        """Put new workers where the base is."""
        super()._load_base()
        state = self.actors.learner.stream_state.remote(self.base.path) if self.base else None
        weights = {self.base_step: self.weights[self.base_step]}
        self.actors.generators[0].start.remote(self.ticks, self.finished, state, weights)
