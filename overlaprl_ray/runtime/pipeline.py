"""The loop: submit batches a little ahead, and collect steps in order.

The four modes are three switches of one graph of calls (graph.py): `sync` has lag 0; `staleness` and `overlap` judge
batches, in the learner; and all but `overlap` score a batch only after the step before it. What happens when an actor
dies is in recovery.py.

    for result in Pipeline(config, actors, record).steps():
        record.add_step(result)
"""

from collections.abc import Iterator

import ray

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.runs.checkpoint import Checkpoint
from overlaprl_ray.runs.recorder import Recorder
from overlaprl_ray.runtime.graph import Graph, unfinished
from overlaprl_ray.runtime.stream_graph import StreamGraph
from overlaprl_ray.runtime.supervisor import Actors, timeout_error
from overlaprl_ray.workers.results import StepResult


class Pipeline:
    """One run, from the initial model or from the checkpoint `start`."""

    def __init__(self, config: ExperimentConfig, actors: Actors, record: Recorder, start: Checkpoint | None = None):
        self.config, self.actors, self.record = config, actors, record
        graph = StreamGraph if config.pipeline.generation == "stream" else Graph
        self.graph = graph(config, actors, record.folder, start)

    def steps(self) -> Iterator[StepResult]:
        """Each remaining step as it finishes; after the last one come evaluations, checkpoints and the final model.

        Raises `RunError`, or `ActorDied` where an actor is gone: after `Graph.resubmit` another call continues there.
        """
        graph, last = self.graph, self.config.grpo.num_steps
        for batch in range(graph.submitted + 1, last + 1):
            while self._must_finish_a_step():
                yield from self._finish_step()
            graph.submit(batch, graph.schedule.weights_step(batch) if graph.exact else graph.finished)
        while graph.queue:
            yield from self._finish_step()
        graph.submit_end()
        self._collect_evaluations(until=last + 1)
        self._commit_checkpoints(wait=True)
        if self.config.output.save_final:
            final = self.actors.learner.save.remote(self.record.folder / "final")
            self.actors.fetch(final, "the final model to be saved")

    def _must_finish_a_step(self) -> bool:
        """Whether the next batch must wait for the oldest step under way.

        Under `exact` it must where the queue is full. Under `latest` a batch is submitted when it can start: this waits
        until the generators are idle or the oldest step is done, whichever comes first.
        """
        queue = self.graph.queue
        if self.graph.exact or queue.full or not queue:
            return queue.full
        self.actors.wait_ready()  # which has a time limit of its own
        oldest, newest = queue[0], queue[-1]
        while pending := unfinished(newest.shares):
            calls, timeout_s = [oldest.calls["train"], *pending], self.config.pipeline.timeout_s
            ready, _ = ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
            if not ready:
                raise timeout_error(f"step {oldest.batch} and batch {newest.batch}", "pipeline.timeout_s")
            if calls[0] in ready:
                return True
        return False

    def _finish_step(self) -> Iterator[StepResult]:
        """Wait for the oldest step and yield its result; once that is recorded, name the checkpoints before it."""
        ticket = self.graph.queue[0]
        step = f"step {ticket.batch} of {self.config.grpo.num_steps}"
        result = self.actors.fetch(ticket.calls["train"], step)
        if result.weights_step != ticket.weights_step and not self.graph.schedule.stream:
            raise RunError(f"{step}: made after step {result.weights_step}, but planned after {ticket.weights_step}")
        self._collect_evaluations(until=ticket.batch)
        self.graph.finish(result)
        yield result
        self._commit_checkpoints()

    def _collect_evaluations(self, until: int) -> None:
        """Record those that ran ahead of a batch up to this one; once it is trained on, they are done."""
        for ticket in self.graph.under_way:
            while ticket.evaluations and ticket.batch <= until:
                done = self.actors.fetch(ticket.calls[f"evaluate-{ticket.evaluations[0]}"], "a held-out evaluation")
                ticket.evaluations.pop(0)
                self.record.add_evaluation(done)
            for done in self.graph.report(ticket) if ticket.batch <= until else ():
                self.record.add_evaluation(done)

    def _commit_checkpoints(self, wait: bool = False) -> None:
        """Name the checkpoints that are whole, once every row and evaluation before them is on disk."""
        for step, last_batch in self.graph.whole_checkpoints(wait):
            self._collect_evaluations(until=last_batch)
            self.graph.commit_checkpoint(step, self.record.accuracies)
