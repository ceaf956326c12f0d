"""The graph of a stream's calls: each call of the generator gets the weights that can be due in it, as references.

                 weights after steps i-1-lag ... i-1          scores
    batch(i) <---------------------------- train(j)  <-------- score(i)      for every batch i

The call makes the evaluations that are due with weights it takes over, and reports them.
"""

from pathlib import Path
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.runs.checkpoint import Checkpoint
from overlaprl_ray.runtime.graph import Graph
from overlaprl_ray.runtime.queue import Ticket
from overlaprl_ray.runtime.supervisor import Actors


class StreamGraph(Graph):
    """One generator, whose calls are a stream's."""

    def __init__(self, config: ExperimentConfig, actors: Actors, folder: Path, start: Checkpoint | None = None):
        super().__init__(config, actors, folder, start)
        self.due = []  # the generator evaluates by itself

    def submit_end(self) -> None:
        """Submit the evaluations that remain after the last batch."""
        generator = self.actors.generators[0]
        self.end.call("report", generator.end, self.last, self._weights_since(self.schedule.oldest_step(self.last + 1)))

    def _generate(self, ticket: Ticket) -> None:
        if ticket.calls.get("generate-0") is None:
            call = self.actors.generators[0].batch.options(num_returns=2)
            weights = self._weights_since(ticket.weights_step)
            ticket.calls["generate-0"], ticket.calls["report"] = call.remote(ticket.batch, weights)

    def _weights_since(self, step: int) -> dict[int, Any]:
        """References to the weights after this step and later ones that were submitted."""
        return {s: weights for s, weights in self.weights.items() if s >= step}
