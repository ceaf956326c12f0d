"""The loop. A run is a graph of actor calls whose edges are object references; the driver submits it a little ahead.

                 weights after step s(i)            scores
    generate(i) <------------------------ step(j)  <-------- score(i)      for every batch i, with s(i) = i - 1 - lag

The four modes are three switches of this one graph: `sync` has lag 0; `staleness` and `overlap` judge (in the learner);
and all but `overlap` make score(i) wait for step i-1, which puts the reference on the critical path. Checkpoints are
nodes of it too: begun after step c, completed once the rollouts of the batches c+1 to c+lag exist. What happens when an
actor dies is in recovery.py.

    Pipeline(config, actors, folder, on_step=print, on_evaluation=print).run()
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from overlaprl_ray.algorithm.schedule import Schedule, evaluations, last_startable
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.runs.checkpoint import Checkpoint, commit
from overlaprl_ray.runs.files import writing
from overlaprl_ray.runtime.queue import RolloutQueue, Ticket
from overlaprl_ray.runtime.supervisor import Actors, fetch, in_vain
from overlaprl_ray.workers.metrics import Evaluation, StepResult


class Pipeline:
    """One run's progress: which steps are finished, which batches are on their way, which weights are still needed."""

    def __init__(
        self,
        config: ExperimentConfig,
        actors: Actors,
        folder: Path,
        on_step: Callable[[StepResult], None],
        on_evaluation: Callable[[Evaluation], None],
        start: Checkpoint | None = None,
    ):
        self.config, self.actors, self.folder = config, actors, folder
        self.on_step, self.on_evaluation = on_step, on_evaluation
        self.schedule = Schedule.of(config)
        self.exact = config.pipeline.schedule == "exact"
        self.base = start  # the newest checkpoint, which a new learner would go on from; None = the initial model
        self.finished = self.submitted = start.step if start else 0
        # Under the exact schedule one batch more than may have started is submitted: it waits for its weights in the
        # generator's inbox, so that no time passes between their publication and its start.
        self.queue = RolloutQueue(capacity=config.lag + 1 + self.exact)
        self.held: dict[int, Ticket] = {}  # finished batches since the base, for a learner that would have to repeat
        self.weights: dict[int, Any] = {}  # step -> Published
        self.to_evaluate = [
            s for s in evaluations(config.grpo.num_steps, config.output.eval_every) if s >= self.finished
        ]
        self.evaluating: list[tuple[int, int, Any]] = []  # (batch that is generated next, step, -> Evaluation)
        self.accuracies: dict[int, float] = {}  # step -> held-out accuracy
        self.begun: dict[int, Any] = {}  # step -> reference that is ready once the learner holds a copy to write
        self.completing: dict[int, Any] = {}  # step -> reference that is ready once the checkpoint is whole
        self.weights[self.finished], self.restored = self.load_base()

    def load_base(self) -> tuple[Any, dict[int, list[Any]]]:
        """Put a new learner where the base is; references to its weights, and to the rollouts there by batch."""
        if self.base is None:
            return self.actors.learner.publish.remote(), {}
        batches, count = self.base.batches, len(self.actors.generators)
        returns = 1 + len(batches) * count
        found = self.actors.learner.restore.options(num_returns=returns).remote(str(self.base.path), self.base.step)
        published, *shares = found if returns > 1 else [found]
        return published, {batch: shares[i * count : (i + 1) * count] for i, batch in enumerate(batches)}

    def advance(self, save_to: Path | None) -> None:
        """Run every step to come, then save. Raises `ActorDied` where an actor is gone, `RunError` for other ends."""
        last = self.config.grpo.num_steps
        while self.finished < last:
            while self._may_submit():
                self._submit(self.submitted + 1)
            if self.exact or self.queue.full or self.submitted == last:
                self._finish_step()
            else:
                self._wait_for_either()
        self._evaluate_until(last)
        self._collect_evaluations(until=last + 1)
        self._commit(wait=True)
        if save_to:
            self.fetch(self.actors.learner.save.remote(str(save_to)), "the final model to be saved")

    def fetch(self, reference: Any, what: str) -> Any:
        """The object behind a reference, within `pipeline.timeout_s`."""
        return fetch(reference, what, self.config.pipeline.timeout_s, "pipeline.timeout_s")

    def waiting(self) -> int:
        """Rollouts that exist and are not trained on yet, the one in training too."""
        shares = [share for ticket in self.queue for share in ticket.shares]
        ready = set(ray.wait(shares, num_returns=len(shares), timeout=0, fetch_local=False)[0] if shares else [])
        return sum(ready.issuperset(ticket.shares) for ticket in self.queue)

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
        source = self.schedule.weights_step(batch) if self.exact else self.finished
        self._evaluate_until(source)
        if batch in self.restored:
            source, shares = self._restored_source(batch), self.restored.pop(batch)
        else:
            shares = [self.generate(i, batch, source) for i in range(len(self.actors.generators))]
        previous = self.queue.newest.result if self.queue.newest else None
        self.queue.put(self.train(Ticket(batch, source, shares, self.score(shares, previous))))
        self.submitted = batch
        self._forget()

    def _restored_source(self, batch: int) -> int:
        assert self.base is not None
        return self.base.weights_steps[self.base.batches.index(batch)]

    def generate(self, index: int, batch: int, source: int) -> Any:
        """Submit one generator's share of a batch."""
        return self.actors.generators[index].generate.remote(batch, source, self.weights[source])

    def score(self, shares: list[Any], previous: Any | None) -> Any | None:
        """Submit a batch's reference scores; in all modes but `overlap` not before the `previous` step's result."""
        if self.actors.reference is None:
            return None
        after = None if self.config.pipeline.mode == "overlap" else previous
        return self.actors.reference.score.remote(after, *shares)

    def train(self, ticket: Ticket) -> Ticket:
        """Submit a batch's training step with the checkpoints around it; returns the ticket with its result."""
        self._complete_checkpoints(ticket)
        result, published = self.actors.learner.step.options(num_returns=2).remote(ticket.scores, *ticket.shares)
        every = self.config.output.checkpoint_every
        if every and ticket.batch % every == 0 and ticket.batch < self.config.grpo.num_steps:
            self.begun[ticket.batch] = self.actors.learner.begin_checkpoint.remote(str(self.folder), ticket.batch)
        if self.config.lag == 0:
            self._complete_checkpoints(ticket)
        self.weights[ticket.batch] = published
        return ticket.with_result(result)

    def _complete_checkpoints(self, newest: Ticket) -> None:
        """Submit the completion of those whose last rollout is this batch's."""
        lag, last = self.config.lag, self.config.grpo.num_steps
        for step, begun in self.begun.items():
            if step in self.completing or min(step + lag, last) != newest.batch:
                continue
            tickets = {**self.held, **{t.batch: t for t in self.queue}, newest.batch: newest}
            shares = [share for batch in range(step + 1, newest.batch + 1) for share in tickets[batch].shares]
            complete = self.actors.learner.complete_checkpoint
            count = len(self.actors.generators)
            self.completing[step] = complete.remote(begun, str(self.folder), step, count, *shares)

    def _evaluate_until(self, step: int) -> None:
        """Submit the evaluations that are due with weights up to this step's; they run before the next batch."""
        while self.to_evaluate and self.to_evaluate[0] <= step:
            due = self.to_evaluate.pop(0)
            self.evaluating.append((self.submitted + 1, due, self.evaluate(due)))
            self._forget()

    def evaluate(self, step: int) -> Any:
        """Submit a held-out evaluation of the policy after a step."""
        return self.actors.generators[0].evaluate.remote(step, self.weights[step])

    def _forget(self) -> None:
        """Drop the weights that no batch and no evaluation, on its way or to come, will ask for."""
        oldest = self.schedule.oldest_step(self.submitted + 1) if self.exact else self.finished
        oldest = min([oldest, *(ticket.weights_step for ticket in self.queue)])
        evaluated = {*self.to_evaluate, *(step for _, step, _ in self.evaluating)}
        for step in [s for s in self.weights if s < oldest and s not in evaluated]:
            del self.weights[step]

    # ---- collecting ----

    def _wait_for_either(self) -> None:
        """Until the generators may be idle or the oldest batch is trained on; a finished step is collected."""
        newest, head = self.queue.newest, self.queue.head
        assert newest is not None
        pending = ray.wait(newest.shares, num_returns=len(newest.shares), timeout=0, fetch_local=False)[1]
        if not pending:
            return  # it was generated just now: the next batch need not wait for a step
        ready, _ = ray.wait(
            [head.result, *pending], num_returns=1, timeout=self.config.pipeline.timeout_s, fetch_local=False
        )
        if not ready:
            raise in_vain(f"step {head.batch} and batch {newest.batch}", "pipeline.timeout_s")
        if head.result in ready:
            self._finish_step()

    def _finish_step(self) -> None:
        ticket = self.queue.head
        what = f"step {ticket.batch} of {self.config.grpo.num_steps}"
        result = self.fetch(ticket.result, what)
        if result.weights_step != ticket.weights_step:
            raise RunError(f"{what}: made after step {result.weights_step}, but planned after {ticket.weights_step}")
        self._collect_evaluations(until=ticket.batch)
        self.queue.pop()
        if self.config.output.checkpoint_every:
            self.held[ticket.batch] = ticket
        self.finished = ticket.batch
        self.on_step(result)
        self._commit()
        self._forget()

    def _collect_evaluations(self, until: int) -> None:
        """Hand on those that ran before a batch up to this one was generated: once it is trained on, they are done."""
        while self.evaluating and self.evaluating[0][0] <= until:
            done = self.fetch(self.evaluating[0][-1], "a held-out evaluation")
            self.evaluating.pop(0)
            self.accuracies[done.step] = done.accuracy
            self.on_evaluation(done)

    def _commit(self, wait: bool = False) -> None:
        """Name the checkpoints that are whole, once every row and evaluation before them is on disk."""
        for step, reference in list(self.completing.items()):
            if not wait and (step > self.finished or not ray.wait([reference], timeout=0)[0]):
                break
            self.fetch(reference, f"checkpoint step-{step}")
            self._collect_evaluations(until=min(step + self.config.lag, self.config.grpo.num_steps))
            with writing(self.folder):
                self.base = commit(self.folder, step, self.config.output.keep_checkpoints, self.accuracies)
            del self.begun[step], self.completing[step]
            self.held = {batch: ticket for batch, ticket in self.held.items() if batch > step}
