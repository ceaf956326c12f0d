"""A generator that decodes all the time: the stream's plan, engine and rewards put together, without Ray.

stream = StreamSampler(sampler, StreamPlan.of(config), evaluated={0, 50})
rollout, evaluations = stream.batch(1, weights)     # weights(step, wait) -> (version, parameters), or None
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from overlaprl_ray.algorithm.stream import StreamPlan
from overlaprl_ray.engines.hf import HFEngine
from overlaprl_ray.engines.stream import HFStream, StreamRow, generated
from overlaprl_ray.rollout import Rollout, pad_right
from overlaprl_ray.tasks import Problem, prompts_of_batch
from overlaprl_ray.workers.generator import Sampler
from overlaprl_ray.workers.results import Evaluation

# The weights after a step; with `wait` however long that takes, else None where they are not ready.
Weights = Callable[[int, bool], tuple[int, dict[str, Tensor]] | None]


class StreamSampler:
    """Makes batch after batch, keeping its running rows between them."""

    def __init__(self, sampler: Sampler, plan: StreamPlan, evaluated: Collection[int] = ()):
        assert isinstance(sampler.engine, HFEngine)
        grpo = sampler.config.grpo
        self.sampler, self.plan, self.evaluated = sampler, plan, evaluated
        self.engine = HFStream(sampler.engine, grpo.max_new_tokens, grpo.temperature)
        self.groups: dict[int, list[StreamRow]] = {}  # admitted and without a batch
        self.steps: dict[int, int] = {}  # the step whose weights each of these started with
        self.loaded = -1  # the step whose weights the engine holds
        self._begin()

    def _begin(self) -> None:
        """Begin to count for the next batch."""
        self.evaluations: list[Evaluation] = []
        self.ticks: list[int] = []  # of take-overs
        self.occupied: list[int] = []  # rows at each tick
        self.waited = self.loading = 0.0  # seconds

    def batch(self, number: int, weights: Weights) -> tuple[Rollout, list[Evaluation]]:
        """Decode until a batch is complete; the evaluations that were due meanwhile are made too."""
        plan, started = self.plan, time.time()
        assert number == len(plan.ended) + 1
        while (groups := plan.end_batch()) is None:
            self._take_over(weights)
            for group in plan.admit():
                self._admit(group)
            if plan.running:
                self.occupied.append(plan.running)
                plan.advance([row.group for row in self.engine.tick()])
            elif plan.is_free:
                self._load(plan.taken + 1, weights, wait=True)
            else:
                plan.jump()
        rollout, evaluations = self._rollout(number, groups, started), self.evaluations
        self._begin()
        return rollout, evaluations

    def end(self, last: int, weights: Weights) -> list[Evaluation]:
        """After the last batch: the evaluations of the steps whose weights were not taken over yet."""
        for step in sorted(step for step in self.evaluated if self.loaded < step <= last):
            self._load(step, weights, wait=True)
        return self.evaluations

    def _take_over(self, weights: Weights) -> None:
        """Take over all weights that are due, one step after another."""
        if self.loaded < 0:
            self._load(0, weights, wait=True)
        while self.plan.is_due:
            self._load(self.plan.taken + 1, weights, wait=True)
        while self.plan.is_free and self._load(self.plan.taken + 1, weights, wait=False):
            pass

    def _load(self, step: int, weights: Weights, wait: bool) -> bool:
        """Take over a step's weights, and evaluate them where that is due; False where they are not ready."""
        started = time.time()
        found = weights(step, wait)
        if found is None:
            return False
        ready = time.time()
        self.sampler.engine.load_weights(*found)
        loaded = time.time()
        self.waited, self.loading = self.waited + ready - started, self.loading + loaded - ready
        if step:
            self.ticks.append(self.plan.tick)
        self.loaded = self.plan.taken = step
        if step in self.evaluated:
            accuracy, n = self.sampler.evaluate()
            span = (loaded, time.time())
            self.evaluations.append(Evaluation(step, found[0], accuracy, n, span))
        return True

    def _problem(self, group: int) -> Problem:
        count, config = self.plan.prompts, self.sampler.config
        return prompts_of_batch(self.sampler.task.train, config.seed, group // count + 1, count)[group % count]

    def _admit(self, group: int) -> None:
        """Start a group's rows, with the prompt and the seeds that a batch would give them."""
        batch, place = group // self.plan.prompts + 1, group % self.plan.prompts
        prompt, size = self.sampler.encode(self._problem(group)), self.plan.group_size
        seed = self.sampler.config.seed
        rows = [StreamRow(group, prompt, (seed, batch, place * size + i)) for i in range(size)]
        self.groups[group], self.steps[group] = rows, self.plan.taken
        self.engine.admit(rows)

    def _rollout(self, batch: int, groups: list[int], started: float) -> Rollout:
        """The batch of these groups, scored."""
        rows = [row for group in groups for row in self.groups.pop(group)]
        oldest = min(self.steps.pop(group) for group in groups)
        prompts = [row.prompt for row in rows]
        problems = [self._problem(group) for group in groups for _ in range(self.plan.group_size)]
        out = generated(rows, self.sampler.engine.pad_id)
        scored = self.sampler.scored(batch, oldest, problems, prompts, out, started)
        versions, _ = pad_right([row.versions for row in rows], 0)
        return dataclasses.replace(
            scored,
            version=min(row.versions[0] for row in rows),
            versions=versions,
            # take-overs lie anywhere in the call: the timeline shows them as one bar at its start
            load=(started, started + self.loading),
            generate=(started + self.loading, scored.generate[1]),
            stream=self._numbers(),
        )

    def _numbers(self) -> dict[str, Any]:
        """What the step's row says of this batch's call."""
        return {
            "weights_ticks": " ".join(map(str, self.ticks)),  # as text: tables hold no lists
            "stream/tick": self.plan.tick,
            "stream/rows": sum(self.occupied) / max(1, len(self.occupied)),
            "time/generator_wait": self.waited,
        }
