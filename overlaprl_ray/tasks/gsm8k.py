"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 grade-school word problems to train on, and 1,319 to test.

Every answer is a worked solution that ends in `#### ` and an integer; `Problem.answer` is what follows the mark, and
the solution stays in the columns. Held-out problems are the first `eval_size` of the test set.

    build_task(TaskConfig(name="gsm8k", path="data/gsm8k")).train[0].answer  # "72"; without `path`, from the hub
"""

from dataclasses import replace

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import records
from overlaprl_ray.tasks.answers import extract_gsm8k_answer
from overlaprl_ray.tasks.problem import Problem, Task
from overlaprl_ray.tasks.sources import Row, read_splits

HUB_NAME = "openai/gsm8k:main"
MARK = "####"


def _problems(rows: list[Row], config: TaskConfig) -> list[Problem]:
    problems = records.problems(rows, config)
    for problem in problems:
        if MARK not in problem.answer or extract_gsm8k_answer(problem.answer) is None:
            raise ConfigError(
                f"task.path: the answer of {problem.where} does not end in {MARK} and a number; "
                "use task.name records for other data"
            )
    return [replace(problem, answer=problem.answer.rpartition(MARK)[2].strip()) for problem in problems]


def build(config: TaskConfig) -> Task:
    """GSM8K from a folder with train.jsonl and test.jsonl, or from the hub."""
    source = config.path or HUB_NAME
    train, test = read_splits(source)
    if test is None:
        raise ConfigError(f"task.path: {source} has no test split; give a folder with train.jsonl and test.jsonl")
    return Task("gsm8k", _problems(train, config), _problems(test[: config.eval_size], config), ("gsm8k",))
