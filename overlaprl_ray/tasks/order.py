"""Which problems make up batch i: a function of (seed, i) and nothing else, so that any batch can be made again.

prompts_of_batch(task.train, seed=0, batch=1, count=4)  # four problems; the same four every time
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from overlaprl_ray.tasks.problem import Problem


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"prompt order, seed {seed}, epoch {epoch}").shuffle(order)
    return order


def prompts_of_batch(problems: Sequence[Problem], seed: int, batch: int, count: int) -> list[Problem]:
    """The `count` problems of `batch` (from 1): positions (batch - 1) * count onward of an endless stream.

    The stream is one permutation of `problems` after another, each epoch shuffled anew from (seed, epoch); batches run
    across the ends of epochs, so every problem is used once an epoch whatever `count` is.
    """
    if batch < 1 or count < 1 or not problems:
        raise ValueError(f"no batch {batch} of {count} out of {len(problems)} problems: each is at least 1")
    stream = (divmod(position, len(problems)) for position in range((batch - 1) * count, batch * count))
    return [problems[_permutation(len(problems), seed, epoch)[place]] for epoch, place in stream]
