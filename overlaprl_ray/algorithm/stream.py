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

import dataclasses
from collections.abc import Sequence

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError


def oldest_token_step(batch: int, lag: int) -> int:
    """The oldest step whose weights can have sampled a token of a batch."""
    return max(0, batch - 1 - 3 * lag)


@dataclasses.dataclass
class OpenGroup:
    """A group with rows that run."""

    call: int  # in which it was admitted
    left: int  # rows that run


@dataclasses.dataclass
class StreamPlan:
    """The counts, and what follows from them. `delay` None: weights are due once ready; `recorded`: when they were."""

    lag: int
    prompts: int  # groups of a batch, P
    group_size: int  # rows of a group, G
    slots: int
    delay: int | None
    recorded: Sequence[int] | None = None  # tick of each step's take-over
    tick: int = 0
    taken: int = 0  # the step whose weights are held
    next_group: int = 0
    ended: list[int] = dataclasses.field(default_factory=list)  # tick of each batch's end
    open: dict[int, OpenGroup] = dataclasses.field(default_factory=dict)
    complete: list[int] = dataclasses.field(default_factory=list)  # groups without a batch, by tick, then by number

    @classmethod
    def of(cls, config: ExperimentConfig, recorded: Sequence[int] | None = None) -> "StreamPlan":
        """A run's plan."""
        grpo, pipeline = config.grpo, config.pipeline
        delay = grpo.max_new_tokens if pipeline.delay is None else pipeline.delay
        slots = pipeline.slots or grpo.batch_rows
        exact = pipeline.schedule == "exact"
        return cls(config.lag, grpo.num_prompts_per_step, grpo.group_size, slots, delay if exact else None, recorded)

    @property
    def running(self) -> int:
        """Rows that run."""
        return sum(group.left for group in self.open.values())

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
        if self.recorded is not None:
            return self.recorded[self.taken] if self.taken < len(self.recorded) else None
        if self.delay is None or self.taken == len(self.ended):
            return None
        return self.ended[self.taken] + self.delay

    @property
    def is_due(self) -> bool:
        """Whether the weights of the next step are to be taken over at this boundary."""
        return self.due_tick is not None and self.due_tick <= self.tick

    @property
    def is_free(self) -> bool:
        """Whether the weights of the next step are to be taken over as soon as they are ready."""
        return self.recorded is None and self.delay is None and self.taken < len(self.ended)

    def admit(self) -> list[int]:
        """The groups that start at this boundary."""
        first = self.next_group
        while self._may_admit():
            self.open[self.next_group] = OpenGroup(len(self.ended) + 1, self.group_size)
            self.next_group += 1
        return list(range(first, self.next_group))

    def _may_admit(self) -> bool:
        if self.running + self.group_size > self.slots:
            return False
        if self.next_group + 1 > (self.lag + 1 + self.taken) * self.prompts:
            return False
        return not self.open or self.open[min(self.open)].call > len(self.ended) - self.lag

    def advance(self, ended: Sequence[int]) -> None:
        """One tick is over, in which rows of these groups ended (a group for each row)."""
        self.tick += 1
        for group in sorted(ended):
            self.open[group].left -= 1
            if self.open[group].left == 0:
                del self.open[group]
                self.complete.append(group)

    def jump(self) -> None:
        """Go to the tick at which weights are due: no row runs, and none may be admitted without them."""
        if self.due_tick is None:
            raise RunError(f"tick {self.tick}: no row runs, and no weights are due; is this the record of another run?")
        self.tick = max(self.tick, self.due_tick)
