"""A run as a graph of actor calls with object references as edges: submits batches, and resubmits what was lost.

                 weights after step s(i)            scores
    generate(i) <------------------------ train(j)  <-------- score(i)      for every batch i, by algorithm/schedule.py

The driver only holds references: it never sees a tensor, and Ray runs each call as soon as its arguments exist. In all
modes but `overlap` score(i) also waits for train(i-1), which puts the reference on the critical path.

Submitting a batch makes those of its calls that have no reference yet: at first all of them, after an actor's death the
ones whose result was lost. Rollouts, scores and weights belong to the driver, so they outlive the actor that made them.

    graph.submit(batch=4, source=2)    # generated with the weights after step 2
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from overlaprl_ray.algorithm.schedule import Schedule, evaluations, last_older_batch, older_sources
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.runs.checkpoint import Checkpoint, clear_scratch, commit
from overlaprl_ray.runs.files import writing
from overlaprl_ray.runtime.queue import RolloutQueue, Ticket
from overlaprl_ray.runtime.supervisor import Actors, is_available, timeout_error
from overlaprl_ray.workers.results import Evaluation, StepResult

OF_THE_LEARNER = ("train", "begin", "complete")  # what the names of a batch's calls to the learner start with


class Graph:
    """Batches under way with their calls, the weights they need, and the batches that a new learner would repeat."""

    def __init__(self, config: ExperimentConfig, actors: Actors, folder: Path, start: Checkpoint | None = None):
        self.config, self.actors, self.folder = config, actors, folder
        self.schedule = Schedule.of(config)
        self.exact = config.pipeline.schedule == "exact" or self.schedule.stream  # what a call needs is known ahead
        self.last = config.grpo.num_steps
        self.base = start  # the newest checkpoint, which a new learner starts from; None: the initial model
        self.since_base: dict[int, Ticket] = {}  # batches submitted since then; without checkpoints, none
        self.finished = self.base_step  # the last step whose result was collected
        # Under the exact schedule one batch more than may have started is submitted: it waits for its weights in the
        # generator's inbox, so that no time passes between their publication and its start.
        self.queue = RolloutQueue(capacity=config.lag + 1 + self.exact)
        self.end = Ticket(self.last + 1, self.last)  # no batch: the evaluations after the last one
        self.due = [s for s in evaluations(self.last, config.output.eval_every) if s >= self.finished]
        self.weights: dict[int, Any] = {}  # step -> Published
        self.restored: dict[int, Ticket] = {}  # batches to come whose rollouts the base holds
        self._load_base()

    @property
    def base_step(self) -> int:
        """The step after which the base was taken."""
        return self.base.step if self.base else 0

    @property
    def submitted(self) -> int:
        """The last batch submitted."""
        return self.finished + len(self.queue)

    @property
    def under_way(self) -> list[Ticket]:
        """Every batch that is submitted and not finished, and the end."""
        return [*self.queue, self.end]

    def submit(self, batch: int, source: int) -> None:
        """Submit the next batch, generated with the weights after step `source`, and first the evaluations up to there.

        A batch whose rollout the base holds is not generated again.
        """
        ticket = self.restored.pop(batch, None) or Ticket(batch, source)
        self._add_evaluations(ticket, until=source)
        self._make_calls(ticket, self.queue[-1] if self.queue else None)
        self.queue.put(ticket)
        self._forget_weights()

    def submit_end(self) -> None:
        """Submit the evaluations that remain after the last batch."""
        self._add_evaluations(self.end, until=self.last)
        self._evaluate(self.end)

    def finish(self, result: StepResult) -> None:
        """The oldest batch is trained on, with this result."""
        ticket = self.queue.popleft()
        ticket.result, self.finished = result, ticket.batch
        self._forget_weights()

    def report(self, ticket: Ticket) -> list[Evaluation]:
        """The evaluations that were made while a batch was: only a stream does that."""
        return []

    def waiting(self) -> int:
        """Rollouts that exist and are not trained on yet, the one in training too."""
        return sum(not unfinished(ticket.shares) for ticket in self.queue)

    # ---- a batch's calls ----

    def _make_calls(self, ticket: Ticket, previous: Ticket | None) -> None:
        """Submit those that have no reference yet, in the order in which each actor takes them."""
        batch, actors = ticket.batch, self.actors
        self._evaluate(ticket)
        self._generate(ticket)
        if actors.reference is not None:
            after = previous.calls["train"] if previous and self.config.pipeline.mode != "overlap" else None
            ticket.call("score", actors.reference.score, after, *ticket.shares)
        if self.config.output.checkpoint_every:
            self.since_base[batch] = ticket
        self._complete_checkpoints(ticket)
        if ticket.calls.get("train") is None:
            train = actors.learner.train.options(num_returns=2)
            published, ticket.calls["train"] = train.remote(ticket.calls.get("score"), *ticket.shares)
            if ticket.result is None or batch not in self.weights:  # else it is repeated, and they are there
                self.weights[batch] = published
        if self._has_checkpoint(batch):
            ticket.call("begin", actors.learner.begin_checkpoint, self.folder, batch)
        self._complete_checkpoints(ticket)

    def _generate(self, ticket: Ticket) -> None:
        batch, source = ticket.batch, ticket.weights_step
        weights = self.weights.get(source)  # None where the base holds the rollout: nobody needs them then
        for i, generator in enumerate(self.actors.generators):
            ticket.call(f"generate-{i}", generator.generate, batch, source, weights)

    def _add_evaluations(self, ticket: Ticket, until: int) -> None:
        """Plan those that are due with weights up to a step ahead of this batch."""
        while self.due and self.due[0] <= until:
            ticket.evaluations.append(self.due.pop(0))

    def _evaluate(self, ticket: Ticket) -> None:
        for step in ticket.evaluations:
            ticket.call(f"evaluate-{step}", self.actors.generators[0].evaluate, step, self.weights[step])

    def _forget_weights(self) -> None:
        """Drop the weights that no batch and no evaluation, under way or to come, will ask for."""
        oldest = self.schedule.oldest_step(self.submitted + 1) if self.exact else self.finished
        oldest = min([oldest, *(ticket.weights_step for ticket in self.queue)])
        evaluated = {*self.due, *(step for ticket in self.under_way for step in ticket.evaluations)}
        self.weights = {s: weights for s, weights in self.weights.items() if s >= oldest or s in evaluated}

    # ---- checkpoints: begun after their step, completed with the last rollout that older weights generate ----

    def _has_checkpoint(self, step: int) -> bool:
        every = self.config.output.checkpoint_every
        return every > 0 and (step % every == 0 or step == self.last)

    def _complete_checkpoints(self, ticket: Ticket) -> None:
        """Submit the completion of those begun whose last rollout is this batch's."""
        for step, begun in self.since_base.items():
            if begun.calls.get("begin") is not None and self._last_batch(step) == ticket.batch:
                batches = [self.since_base[batch] for batch in range(step + 1, ticket.batch + 1)]
                shares = [share for batch in batches for share in batch.shares]
                wanted = older_sources(step, self.config.lag, self.last) if self.exact else []
                older = {source: self.weights[source] for source in wanted if source in self.weights}
                complete = self.actors.learner.complete_checkpoint
                held = (list(older), *older.values(), *shares)
                ticket.call(f"complete-{step}", complete, begun.calls["begin"], self.folder, step, *held)

    def _last_batch(self, step: int) -> int:
        return last_older_batch(step, self.config.lag, self.last)

    def whole_checkpoints(self, wait: bool) -> Iterator[tuple[int, int]]:
        """(step, last batch) of each checkpoint that is written completely; with `wait`, of all, once they are."""
        for step in filter(self._has_checkpoint, list(self.since_base)):
            newest = self.since_base.get(self._last_batch(step))
            written = newest.calls.get(f"complete-{step}") if newest else None
            if not wait and (written is None or step > self.finished or not ray.wait([written], timeout=0)[0]):
                return
            self.actors.fetch(written, f"checkpoint step-{step}")
            yield step, self._last_batch(step)

    def commit_checkpoint(self, step: int, accuracies: dict[int, float]) -> None:
        """Give a whole checkpoint its name: it is the new base."""
        with writing(self.folder):
            self.base = commit(self.folder, step, self.config.output.keep_checkpoints, accuracies)
        self.since_base = {batch: ticket for batch, ticket in self.since_base.items() if batch > step}

    # ---- after a death ----

    def settle(self) -> None:
        """Wait until each call under way has ended: a living actor finishes its own, a dead one's fail at once."""
        calls = [call for ticket in self.under_way for call in ticket.calls.values() if call is not None]
        timeout_s = self.config.pipeline.timeout_s
        if calls and ray.wait(calls, num_returns=len(calls), timeout=timeout_s, fetch_local=False)[1]:
            raise timeout_error("the calls under way when an actor died", "pipeline.timeout_s")

    def resubmit(self, new_learner: bool) -> list[Ticket]:
        """Resubmit every call whose result was lost, in the order of the schedule.

        A new learner loads the base and repeats the finished steps since then on the rollouts they had; returns these.
        """
        repeated = []
        if new_learner:
            clear_scratch(self.folder)
            self._load_base()
            repeated = [ticket for ticket in self.since_base.values() if ticket.result]
            for ticket in [*repeated, *self.queue]:
                ticket.calls |= {name: None for name in ticket.calls if name.startswith(OF_THE_LEARNER)}
        for ticket in repeated:
            self._make_calls(ticket, None)
        previous = None
        for ticket in self.queue:
            self._drop_lost(ticket)
            self._make_calls(ticket, previous)
            previous = ticket
        self._drop_lost(self.end)
        self._evaluate(self.end)
        return repeated

    def _load_base(self) -> None:
        """Put a new learner where the base is; keep references to its weights and to the rollouts that it holds."""
        base, learner, count = self.base, self.actors.learner, len(self.actors.generators)
        if base is None:
            published = learner.publish.remote()
        else:
            returns = 1 + len(base.weights) + len(base.batches) * count
            results = learner.restore.options(num_returns=returns).remote(base.path, base.step)
            published, *held = results if returns > 1 else [results]
            older, shares = held[: len(base.weights)], held[len(base.weights) :]
            for source, weights in zip(base.weights, older, strict=True):
                if not is_available(self.weights.get(source)):
                    self.weights[source] = weights
            for i, (batch, source) in enumerate(zip(base.batches, base.weights_steps, strict=True)):
                calls = {f"generate-{j}": share for j, share in enumerate(shares[i * count : (i + 1) * count])}
                if batch > self.finished or self.schedule.stream:
                    self.restored[batch] = Ticket(batch, source, calls=calls)
        if not is_available(self.weights.get(self.base_step)):
            self.weights[self.base_step] = published

    def _drop_lost(self, ticket: Ticket) -> None:
        """Forget the references to lost results; what the base holds of the rollout replaces them."""
        restored = self.restored.pop(ticket.batch).calls if ticket.batch in self.restored else {}
        for name, reference in ticket.calls.items():
            if not is_available(reference):
                ticket.calls[name] = restored.get(name)
        if ticket.calls.get("train") is None:
            ticket.calls["begin"] = None  # a checkpoint begun after a step that failed holds nothing


def unfinished(calls: list[Any]) -> list[Any]:
    """Those of these calls that have not ended yet."""
    return ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)[1]
