"""Which weights generate which batch, and when, and each step's learning rate. Pure arithmetic: why runs replay.

Steps and batches count from 1; "after step 0" is the initial policy. Batch i may start once step i-1-lag is done and,
under the exact schedule, is generated with the weights after exactly that step.

    [weights_step(batch, lag=2) for batch in range(1, 7)]    # [0, 0, 0, 1, 2, 3]
"""

import math

import numpy as np

from overlaprl_ray.config import GRPOConfig


def weights_step(batch: int, lag: int) -> int:
    """The step whose weights generate a batch under the exact schedule."""
    return max(0, batch - 1 - lag)


def last_startable(finished: int, lag: int, num_steps: int) -> int:
    """The newest batch that may have started once `finished` steps are done."""
    return min(finished + 1 + lag, num_steps)


def is_too_old(batch: int, made_after: int, lag: int) -> bool:
    """Whether a rollout breaks the bound: more than lag+1 batches from the start of its generation to its training."""
    return made_after < weights_step(batch, lag)


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
