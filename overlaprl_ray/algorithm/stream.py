"""What a stream of groups does at every tick, by counts alone: which batch ends, which weights and groups come in.

A tick is one decode step of all running rows. Groups of G rows are numbered from 0 and admitted in order; the P that
complete first are the first batch. Calls, batches and steps count from 1: call k makes batch k, step k trains on it.
Timing decides one thing, at which tick the weights of a step are taken over: `delay` ticks after its batch (`exact`),
or as soon as they are ready (`latest`), which is recorded.

No row gets too old. A group counts as trained on once the weights of its step are taken over, and at most (lag + 1) P
groups are admitted and not so counted. In call c, with c - 1 batches ended, a group is therefore admitted with the
weights of step c - 1 - lag or of a later one. While the oldest unfinished group was admitted in call c, nothing is
admitted from call c + lag + 1 on; at most lag P groups are without a batch then, so that group is in batch c + 2 lag or
before. Hence a token of batch b was sampled with the weights of step b - 1 - 3 lag or of a later one. And as at most
(lag + 1) P groups are not counted when call k - 1 ends, call k takes over weights of steps k - 1 - lag to k - 1 only.

    plan = StreamPlan(lag=1, prompts=4, group_size=8, slots=32, delay=3)
    plan.end_batch(); plan.is_due; plan.admit(); plan.advance(ended_groups)    # one tick
"""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError


def oldest_token_step(batch: int, lag: int) -> int:
    """The oldest step whose weights can have sampled a token of a batch."""
    return max(0, batch - 1 - 3 * lag)


def ticks_of(text: str) -> dict[int, int]:
    """The record of one batch, "3:41 4:47": weights of which steps were taken over while it was made, and when."""
    pairs = (pair.split(":") for pair in text.split())
    return {int(step): int(tick) for step, tick in pairs}


COUNTS = ("tick", "taken", "next_group", "ended", "open", "complete")


@dataclasses.dataclass
class StreamPlan:
    """The counts, and what follows from them.

    `delay` None: weights are due once they are ready. `recorded`: when they were taken over, by step; until `settled`
    batches have ended no others are.
    """

    lag: int
    prompts: int  # groups of a batch, P
    group_size: int  # rows of a group, G
    slots: int
    delay: int | None
    recorded: Mapping[int, int] = dataclasses.field(default_factory=dict)  # step -> tick
    settled: float = 0
    tick: int = 0
    taken: int = 0  # the step whose weights are held
    next_group: int = 0
    ended: list[int] = dataclasses.field(default_factory=list)  # tick of each batch's end
    open: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # group -> its call, rows that run
    complete: list[int] = dataclasses.field(default_factory=list)  # groups without a batch, by tick, then by number

    @classmethod
    def of(
        cls, config: ExperimentConfig, recorded: Mapping[int, int] | None = None, settled: float = math.inf
    ) -> "StreamPlan":
        """A run's plan, or with its record that of a run to be repeated."""
        grpo, pipeline = config.grpo, config.pipeline
        delay = grpo.max_new_tokens if pipeline.delay is None else pipeline.delay
        slots = pipeline.slots or grpo.batch_rows
        exact = pipeline.schedule == "exact"
        plan = cls(config.lag, grpo.num_prompts_per_step, grpo.group_size, slots, delay if exact else None)
        return plan if recorded is None else dataclasses.replace(plan, recorded=recorded, settled=settled)

    @property
    def running(self) -> int:
        """Rows that run."""
        return sum(left for _, left in self.open.values())

    def end_batch(self) -> list[int] | None:
        """The groups of the batch that ends at this boundary, by number; None where too few are complete."""
        if len(self.complete) < self.prompts:
            return None
        groups, self.complete = self.complete[: self.prompts], self.complete[self.prompts :]
        self.ended.append(self.tick)
        return sorted(groups)

    @property
    def due_tick(self) -> int | None:
        """When the weights of the next step are taken over; None: not known, or when they are ready."""
        if self.taken + 1 in self.recorded:
            return self.recorded[self.taken + 1]
        if self.delay is None or self.taken == len(self.ended) or len(self.ended) < self.settled:
            return None
        return self.ended[self.taken] + self.delay

    @property
    def is_due(self) -> bool:
        """Whether the weights of the next step are to be taken over at this boundary."""
        return self.due_tick is not None and self.due_tick <= self.tick

    @property
    def is_free(self) -> bool:
        """Whether the weights of the next step are to be taken over as soon as they are ready."""
        if self.taken + 1 in self.recorded or len(self.ended) < self.settled:
            return False
        return self.delay is None and self.taken < len(self.ended)

    def state(self) -> dict[str, Any]:
        """The counts, to go on from."""
        return {name: copy.deepcopy(getattr(self, name)) for name in COUNTS}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        for name in COUNTS:
            setattr(self, name, state[name])

    def admit(self) -> list[int]:
        """The groups that start at this boundary."""
        first = self.next_group
        while self._may_admit():
            self.open[self.next_group] = len(self.ended) + 1, self.group_size
            self.next_group += 1
        return list(range(first, self.next_group))

    def _may_admit(self) -> bool:
        if self.running + self.group_size > self.slots:
            return False
        if self.next_group + 1 > (self.lag + 1 + self.taken) * self.prompts:
            return False
        return not self.open or self.open[min(self.open)][0] > len(self.ended) - self.lag

    def advance(self, ended: Sequence[int]) -> None:
        """One tick is over, in which rows of these groups ended (a group for each row)."""
        self.tick += 1
        for group in sorted(ended):
            call, left = self.open.pop(group)
            if left > 1:
                self.open[group] = call, left - 1
            else:
                self.complete.append(group)

    def jump(self) -> None:
        """Go to the tick at which weights are due: no row runs, and none may be admitted without them."""
        if self.due_tick is None:
            raise RunError(f"tick {self.tick}: no row runs, and no weights are due; is this the record of another run?")
        self.tick = max(self.tick, self.due_tick)
