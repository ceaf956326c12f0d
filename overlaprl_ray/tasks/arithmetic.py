"""Addition: the built-in task, which needs no data and which a model of 0.1 M parameters can learn.

`12+34=` is answered `64`: the sum 46 with the least significant digit first (`reverse_answer`), the order in which a
small model can carry (Lee et al. 2023, "Teaching Arithmetic to Small Transformers", arXiv 2307.03381).

    build_task(TaskConfig(name="arithmetic", digits=2)).train[0]  # Problem(prompt="70+52=", answer="221", columns=...)
"""

import random
from itertools import combinations_with_replacement

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks.problem import Problem, Task, render

# The split is part of the task: the same for every run, whatever its seed, so that accuracies can be compared.
SPLIT_SEED = "arithmetic"
MAX_PAIRS = 50_000


def _pairs(digits: int) -> list[tuple[int, int]]:
    """Pairs a <= b of numbers of `digits` digits, shuffled: all of them, or from 3 digits on MAX_PAIRS draws."""
    rng = random.Random(SPLIT_SEED)
    numbers = range(10 ** (digits - 1), 10**digits)
    if len(numbers) ** 2 // 2 <= MAX_PAIRS:
        pairs = list(combinations_with_replacement(numbers, 2))
    else:
        drawn = ((rng.choice(numbers), rng.choice(numbers)) for _ in range(MAX_PAIRS))
        pairs = list(dict.fromkeys((min(pair), max(pair)) for pair in drawn))
    rng.shuffle(pairs)
    return pairs


def build(config: TaskConfig) -> Task:
    """Every pair (see `_pairs`), `eval_size` of them held out; a + b and b + a are always on the same side."""
    template = config.prompt_template or "{a}+{b}="

    def problem(a: int, b: int) -> Problem:
        total = str(a + b)
        columns = {"a": a, "b": b, "question": f"{a}+{b}="}
        prompt = render(template, columns, f"{a} + {b}")
        return Problem(prompt, total[::-1] if config.reverse_answer else total, columns)

    held: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for a, b in _pairs(config.digits):
        orders = list(dict.fromkeys([(a, b), (b, a)]))
        (held if len(held) + len(orders) <= config.eval_size else rest).extend(orders)
    if len(held) < config.eval_size or not rest:
        raise ConfigError(
            f"task.eval_size: {config.eval_size} leaves nothing to train on of the {len(held) + len(rest)} problems "
            f"with task.digits {config.digits}; make it smaller"
        )
    random.Random(SPLIT_SEED).shuffle(rest)
    return Task("arithmetic", [problem(*p) for p in rest], [problem(*p) for p in held], ("exact_match",))
