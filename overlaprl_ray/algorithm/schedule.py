"""Which weights generate which batch, and when. Pure arithmetic: the whole reason why a run can be replayed.

Steps and batches count from 1; "after step 0" is the initial policy. Batch i may start once step i-1-lag is done and,
under the exact schedule, is generated with the weights after exactly that step.

    [weights_step(batch, lag=2) for batch in range(1, 7)]    # [0, 0, 0, 1, 2, 3]
"""


def weights_step(batch: int, lag: int) -> int:
    """The step whose weights generate a batch under the exact schedule."""
    return max(0, batch - 1 - lag)


def oldest_step(batch: int, lag: int) -> int:
    """The oldest step whose weights this batch, or any after it, may need: all older weights can be dropped."""
    return weights_step(batch, lag)


def last_older_batch(step: int, lag: int, num_steps: int) -> int:
    """The last batch that weights older than those after `step` generate: a checkpoint keeps the rollouts up to it."""
    return min(step + lag, num_steps)


def is_too_old(batch: int, made_after: int, lag: int) -> bool:
    """Whether a rollout breaks the bound: more than lag+1 batches from the start of its generation to its training."""
    return made_after < oldest_step(batch, lag)


def evaluations(num_steps: int, every: int) -> list[int]:
    """The steps after which the policy is evaluated: before the first, every `every` (0: no others), after the last."""
    return sorted({0, num_steps, *(range(every, num_steps, every) if every else ())})
