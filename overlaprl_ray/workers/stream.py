"""A generator that decodes all the time: the stream's plan, engine and rewards put together, without Ray.

stream = StreamSampler(sampler, StreamPlan.of(config), evaluated={0, 50})
rollout, report = stream.batch(1, weights)     # weights(step, wait) -> (version, parameters), or None
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
from overlaprl_ray.workers.results import Evaluation, Report

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
        self.begun = False  # whether the engine holds weights of this run
        self._begin()

    def _begin(self) -> None:
        """Begin to count for the next batch."""
        self.report = Report([], {})
        self.ticks: dict[int, int] = {}  # step -> tick at which its weights were taken over
        self.occupied: list[int] = []  # rows at each tick
        self.waited = self.loading = 0.0  # seconds

    def state(self) -> dict[str, Any]:
        """All that goes on depends on beside configuration and weights, right after a refresh."""
        rows = {group: [dataclasses.asdict(row) for row in rows] for group, rows in self.groups.items()}
        running = [(row.group, self.groups[row.group].index(row)) for row in self.engine.rows]
        counts = {"steps": dict(self.steps), "ticks": dict(self.ticks), "occupied": list(self.occupied)}
        return {"plan": self.plan.state(), "rows": rows, "running": running, **counts}

    def load(self, state: dict[str, Any], weights: Weights) -> None:
        """Go on from what `state` gave."""
        self.plan.load(state["plan"])
        self.groups = {group: [StreamRow(**row) for row in rows] for group, rows in state["rows"].items()}
        self.steps, self.ticks, self.occupied = state["steps"], state["ticks"], state["occupied"]
        version, parameters = weights(self.plan.taken, True) or (0, {})
        self.sampler.engine.load_weights(version, parameters)
        self.engine.start([self.groups[group][place] for group, place in state["running"]])
        self.begun = True
        self._evaluate(version)

    def batch(self, number: int, weights: Weights) -> tuple[Rollout, Report]:
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
        rollout, report = self._rollout(number, groups, started), self.report
        self._begin()
        return rollout, report

    def end(self, last: int, weights: Weights) -> Report:
        """After the last batch: the evaluations of the steps whose weights were not taken over yet."""
        for step in sorted(step for step in self.evaluated if self.plan.taken < step <= last):
            self._load(step, weights, wait=True)
        return self.report

    def _take_over(self, weights: Weights) -> None:
        """Take over all weights that are due, one step after another."""
        if not self.begun:
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
        self.plan.taken, self.begun = step, True
        config = self.sampler.config
        if step:
            self.ticks[step] = self.plan.tick
            if config.pipeline.refresh_every and step % config.pipeline.refresh_every == 0:
                self.engine.refresh()
            if config.output.checkpoint_every and step % config.output.checkpoint_every == 0:
                self.report.states[step] = self.state()
        self._evaluate(found[0])
        return True

    def _evaluate(self, version: int) -> None:
        """Held-out accuracy under the weights just taken over, where it is due; with a cache of its own."""
        step, started = self.plan.taken, time.time()
        if step in self.evaluated:
            accuracy, n = self.sampler.evaluate(step)
            self.report.evaluations.append(Evaluation(step, version, accuracy, n, (started, time.time())))

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
            "weights_ticks": " ".join(f"{step}:{tick}" for step, tick in self.ticks.items()),
            "stream/tick": self.plan.tick,
            "stream/rows": sum(self.occupied) / max(1, len(self.occupied)),
            "time/generator_wait": self.waited,
        }
