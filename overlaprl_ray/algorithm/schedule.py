"""Which weights generate which batch, and when, and each step's learning rate. Pure arithmetic: why runs replay.

Steps and batches count from 1; "after step 0" is the initial policy. Batch i may start once step i-1-lag is done and,
under the exact schedule, is generated with the weights after exactly that step.

    schedule = Schedule(lag=2)
    [schedule.weights_step(batch) for batch in range(1, 7)]    # [0, 0, 0, 1, 2, 3]
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from overlaprl_ray.algorithm.stream import oldest_token_step
from overlaprl_ray.config import ExperimentConfig, GRPOConfig

LATE = 1  # tells the draw of a batch's lateness from other draws with its number


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which weights generate a batch: as `lag` says, or with chance `late_share` those of `late_lag` steps before.

    `recorded`: what a run with `schedule: latest` did instead, the step for each batch.
    """

    lag: int
    late_share: float = 0.0
    late_lag: int = 0
    seed: int = 0
    recorded: Sequence[int] = ()
    stream: bool = False

    @classmethod
    def of(cls, config: ExperimentConfig, recorded: Sequence[int] = ()) -> "Schedule":
        """A run's schedule."""
        stream = config.pipeline.generation == "stream"
        return cls(config.lag, config.pipeline.late_share, config.late_lag, config.seed, recorded, stream)

    def weights_step(self, batch: int) -> int:
        """The step whose weights generate a batch, under the exact schedule or as recorded."""
        if self.recorded:
            return self.recorded[batch - 1]
        late = self.late_lag and seeded_uniform(self.seed, batch, LATE) < self.late_share
        return max(0, batch - 1 - self.lag - (self.late_lag if late else 0))

    def oldest_step(self, batch: int) -> int:
        """The oldest step whose weights this batch or a later one can ask for. Sources need not rise with batches.

        In a stream: the oldest that its call can take over.
        """
        return max(0, batch - 1 - self.lag - self.late_lag)

    def oldest_token(self, batch: int) -> int:
        """The oldest step whose weights can have sampled a token of this batch: in a stream rows outlive batches."""
        return oldest_token_step(batch, self.lag) if self.stream else self.oldest_step(batch)

    def is_too_old(self, batch: int, made_after: int) -> bool:
        """Whether a rollout breaks the bound: lag + 1 batches, and `late_lag` more, from generation to training."""
        return made_after < self.oldest_token(batch)


def last_older_batch(step: int, lag: int, num_steps: int) -> int:
    """The last batch that weights older than those after `step` generate: a checkpoint keeps the rollouts up to it."""
    return min(step + lag, num_steps)


def older_sources(step: int, lag: int, num_steps: int) -> list[int]:
    """The steps before `step` whose weights batches beyond `num_steps` would be made from: a longer run needs them."""
    last = last_older_batch(step, lag, num_steps)
    return sorted({max(0, batch - 1 - lag) for batch in range(last + 1, step + lag + 1)} - {step})


def evaluations(num_steps: int, every: int) -> list[int]:
    """The steps after which the policy is evaluated: before the first, every `every` (0: no others), after the last."""
    return sorted({0, num_steps, *(range(every, num_steps, every) if every else ())})


def learning_rate(step: int, grpo: GRPOConfig) -> float:
    """The rate of all updates of a step: a function of its number alone, so that discards do not delay it.

    Warm-up rises linearly from lr / lr_warmup_steps at step 1 to lr at step lr_warmup_steps. Then `linear` and `cosine`
    fall towards lr * lr_min_ratio, which they would reach one step after the last, as Hugging Face's schedules do.
    """
    if step <= grpo.lr_warmup_steps:
        return grpo.lr * (step / grpo.lr_warmup_steps)
    if grpo.lr_schedule == "constant":
        return grpo.lr
    progress = min(1.0, (step - 1 - grpo.lr_warmup_steps) / max(1, grpo.num_steps - grpo.lr_warmup_steps))
    left = 1 - progress if grpo.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return grpo.lr * (grpo.lr_min_ratio + (1 - grpo.lr_min_ratio) * left)


def seeded_uniform(*key: int) -> float:
    """A number in [0, 1) that follows from the key (run's seed, batch, ...) alone."""
    return float(np.random.default_rng(key).random())
