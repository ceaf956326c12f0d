"""The loop. A run is a graph of actor calls whose edges are object references; the driver submits it a little ahead.

                 weights after step s(i)            scores
    generate(i) <------------------------ step(j)  <-------- score(i)      for every batch i, with s(i) = i - 1 - lag

The four modes are three switches of this one graph: `sync` has lag 0; `staleness` and `overlap` judge (in the learner);
and all but `overlap` make score(i) wait for step i-1, which puts the reference on the critical path.

    Pipeline(config, actors, on_step=print, on_evaluation=print).run()
"""

from collections.abc import Callable
from typing import Any

import ray

from overlaprl_ray.actors import Actors, Evaluation, fetch
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.metrics import StepResult
from overlaprl_ray.queue import RolloutQueue, Ticket
from overlaprl_ray.schedule import evaluations, last_startable, weights_step


class Pipeline:
    """One run's progress: which steps are finished, which batches are on their way, which weights are still needed."""

    def __init__(
        self,
        config: ExperimentConfig,
        actors: Actors,
        on_step: Callable[[StepResult], None],
        on_evaluation: Callable[[Evaluation], None],
    ):
        self.config, self.actors = config, actors
        self.on_step, self.on_evaluation = on_step, on_evaluation
        self.exact = config.pipeline.schedule == "exact"
        self.finished = 0
        self.submitted = 0
        # Under the exact schedule one batch more than may have started is submitted: it waits for its weights in the
        # generator's inbox, so that no time passes between their publication and its start.
        self.queue = RolloutQueue(capacity=config.lag + 1 + self.exact)
        self.weights: dict[int, Any] = {0: actors.learner.publish.remote()}  # step -> Published
        self.to_evaluate = evaluations(config.grpo.num_steps, config.output.eval_every)
        self.evaluating: list[tuple[int, Any]] = []  # (batch that is generated next, -> Evaluation)

    def run(self) -> None:
        """Run every step. Raises `RunError` where an actor fails or a wait exceeds `pipeline.timeout_s`."""
        while self.finished < self.config.grpo.num_steps:
            while self._may_submit():
                self._submit(self.submitted + 1)
            if self.exact or self.queue.full or self.submitted == self.config.grpo.num_steps:
                self._finish_step()
            else:
                self._wait_for_either()
        self._evaluate_until(self.config.grpo.num_steps)
        self._collect_evaluations(until=self.config.grpo.num_steps + 1)

    # ---- submitting ----

    def _may_submit(self) -> bool:
        batch = self.submitted + 1
        if batch > self.config.grpo.num_steps or self.queue.full:
            return False
        if self.exact:
            return True
        return batch <= last_startable(self.finished, self.config.lag, self.config.grpo.num_steps) and self._idle()

    def _idle(self) -> bool:
        """Whether the generators have nothing to do, so that a batch submitted now starts now."""
        newest = self.queue.newest
        if newest is None:
            return True
        ready, _ = ray.wait(newest.shares, num_returns=len(newest.shares), timeout=0, fetch_local=False)
        return len(ready) == len(newest.shares)

    def _submit(self, batch: int) -> None:
        source = weights_step(batch, self.config.lag) if self.exact else self.finished
        self._evaluate_until(source)
        weights = self.weights[source]
        shares = [generator.generate.remote(batch, source, weights) for generator in self.actors.generators]
        scores = None
        if self.actors.reference is not None:
            previous = self.queue.newest.result if self.queue.newest else None
            after = None if self.config.pipeline.mode == "overlap" else previous
            scores = self.actors.reference.score.remote(after, *shares)
        result, published = self.actors.learner.step.options(num_returns=2).remote(scores, *shares)
        self.queue.put(Ticket(batch, source, shares, scores, result, published))
        self.weights[batch] = published
        self.submitted = batch
        self._forget()

    def _evaluate_until(self, step: int) -> None:
        """Submit the evaluations that are due with weights up to this step's; they run before the next batch."""
        while self.to_evaluate and self.to_evaluate[0] <= step:
            due = self.to_evaluate.pop(0)
            evaluation = self.actors.generators[0].evaluate.remote(due, self.weights[due])
            self.evaluating.append((self.submitted + 1, evaluation))
            self._forget()

    def _forget(self) -> None:
        """Drop the weights that no batch and no evaluation to come will ask for."""
        oldest = weights_step(self.submitted + 1, self.config.lag) if self.exact else self.finished
        for step in [s for s in self.weights if s < oldest and s not in self.to_evaluate]:
            del self.weights[step]

    # ---- collecting ----

    def _wait_for_either(self) -> None:
        """Until the generators are idle or the oldest batch is trained on; a finished step is collected."""
        newest, head = self.queue.newest, self.queue.head
        assert newest is not None
        pending = [ref for ref in newest.shares if not ray.wait([ref], timeout=0, fetch_local=False)[0]]
        ready, _ = ray.wait(
            [head.result, *pending], num_returns=1, timeout=self.config.pipeline.timeout_s, fetch_local=False
        )
        if not pending or head.result in ready or not ready:
            self._finish_step()

    def _finish_step(self) -> None:
        ticket = self.queue.head
        what = f"step {ticket.batch} of {self.config.grpo.num_steps}"
        result = fetch(ticket.result, what, self.config.pipeline.timeout_s, "pipeline.timeout_s")
        if result.weights_step != ticket.weights_step:
            raise RunError(f"{what}: made after step {result.weights_step}, but planned after {ticket.weights_step}")
        self.queue.pop()
        self.finished = ticket.batch
        self._collect_evaluations(until=ticket.batch)
        self.on_step(result)
        self._forget()

    def _collect_evaluations(self, until: int) -> None:
        """Hand on those that ran before a batch up to this one was generated: once it is trained on, they are done."""
        while self.evaluating and self.evaluating[0][0] <= until:
            _, reference = self.evaluating.pop(0)
            limit = self.config.pipeline.timeout_s
            self.on_evaluation(fetch(reference, "a held-out evaluation", limit, "pipeline.timeout_s"))
