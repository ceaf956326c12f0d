"""Questions and answers from any data with a column for each: your own file or folder, or a dataset of the hub.

Held-out problems are the first `eval_size` rows of `task.eval_path`, else of the test split that comes with the data.
Without either, `eval_size` rows of the data, at most a fifth, are drawn: the same ones in every run. Rows count one by
one: a question that stands in the data twice can fall on both sides, so give deduplicated data or an `eval_path`.

Example::

    build_task(TaskConfig(name="records", path="problems.jsonl", prompt_template="{question} Answer in \\\\boxed{{}}."))
"""

import random
from collections.abc import Sequence
from pathlib import Path

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks.problem import Problem, Task, check_text, render
from overlaprl_ray.tasks.sources import Row, read_file, read_splits

# The split is part of the task: the same for every run, whatever its seed, so that accuracies can be compared.
SPLIT_SEED = "records"
LARGEST_SHARE = 5  # at most one row in this many is held out


def problems(rows: Sequence[Row], config: TaskConfig) -> list[Problem]:
    """Rows as problems. ConfigError, naming the row, for a missing column or a value that is no text or number."""
    return [_problem(row, config) for row in rows]


def _problem(row: Row, config: TaskConfig) -> Problem:
    where, columns = row
    if config.prompt_template is None:
        prompt = _text(row, "question_column", config.question_column)
    else:
        prompt = render(config.prompt_template, columns, where)
    answer = _text(row, "answer_column", config.answer_column)
    return Problem(check_text(prompt, where), check_text(answer, where), columns)


def _text(row: Row, field: str, column: str) -> str:
    where, columns = row
    if column not in columns:
        there = ", ".join(map(str, columns))
        raise ConfigError(f"task.{field}: no column {column!r} in {where}; set task.{field} to one of {there}")
    value = columns[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ConfigError(f"task.{field}: {column!r} is {value!r:.60} in {where}; make it a text or a number")
    return str(value)


def _split(whole: list[Problem], size: int) -> tuple[list[Problem], list[Problem]]:
    size = min(size, max(1, len(whole) // LARGEST_SHARE))
    if size == len(whole):
        raise ConfigError("task.path: one row cannot be trained on and held out; give more rows, or task.eval_path")
    held = set(random.Random(SPLIT_SEED).sample(range(len(whole)), size))
    return [p for i, p in enumerate(whole) if i not in held], [p for i, p in enumerate(whole) if i in held]


def build(config: TaskConfig) -> Task:
    """The data at `config.path`, of which `eval_size` rows at most are held out (see the module's docstring)."""
    if config.path is None:
        raise ConfigError("task.path: nothing given; task records needs a file, a folder or the name of a hub dataset")
    rows, test = read_splits(config.path)
    if config.eval_path is not None:
        test = read_file(Path(config.eval_path).expanduser(), "task.eval_path")
    train = problems(rows, config)
    if test is None:
        train, heldout = _split(train, config.eval_size)
    else:
        heldout = problems(test[: config.eval_size], config)
    return Task("records", train, heldout, ("math",))
