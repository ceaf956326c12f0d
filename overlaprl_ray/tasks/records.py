"""Questions and answers from any data with a column for each: your own file or folder, or a dataset of the hub.

Held-out problems are the first `eval_size` rows of `task.eval_path`, else of the data's test or validation split.
Without either, `eval_size` rows of the data, at most a fifth, are drawn: the same ones in every run. Rows count one by
one: a question that stands in the data twice can fall on both sides, so give deduplicated data or an `eval_path`.

A question is a text, or role/content turns (a column `messages` or `prompt`), whose last user turn is the question. A
column inside another has a dotted path: `reward_model.ground_truth`.

    build_task(TaskConfig(name="records", path="problems.jsonl", prompt_template="{question} Answer in \\\\boxed{{}}."))
"""

import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks.problem import Problem, Task, check_text, render
from overlaprl_ray.tasks.sources import Row, read_file, read_splits

# The split is part of the task: the same for every run, whatever its seed, so that accuracies can be compared.
SPLIT_SEED = "records"
TURNS = ("messages", "prompt")  # columns of role/content turns, looked at where there is no question column
LARGEST_SHARE = 5  # at most one row in this many is held out


def problems(rows: Sequence[Row], config: TaskConfig) -> list[Problem]:
    """Rows as problems. ConfigError, naming the row, for a missing column or a value that is no text or number."""
    return [_problem(row, config) for row in rows]


def _problem(row: Row, config: TaskConfig) -> Problem:
    where, columns = row
    column, template = config.question_column, config.prompt_template
    if column not in columns and template is None:
        column = next((name for name in TURNS if isinstance(columns.get(name), list)), column)
    turns = _turns(columns[column], where, config) if isinstance(columns.get(column), list) else []
    if template is not None:
        prompt = render(template, {**columns, **({"question": turns[-1]["content"]} if turns else {})}, where)
    else:
        prompt = turns[-1]["content"] if turns else _text(row, "question_column", column)
    if turns:
        turns[-1]["content"] = prompt
    answer = _text(row, "answer_column", config.answer_column)
    for text in (prompt, answer, *(turn["content"] for turn in turns)):
        check_text(text, where)
    return Problem(prompt, answer, columns, tuple(turns), where)


def _turns(value: list[Any], where: str, config: TaskConfig) -> list[dict[str, str]]:
    """A conversation up to its last user turn. ConfigError for anything but turns of text."""
    turns = []
    for turn in value:
        role, content = (turn.get(name) if isinstance(turn, Mapping) else None for name in ("role", "content"))
        if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(content, str) or not isinstance(role, str):
            raise ConfigError(f"task.question_column: {where} holds {turn!r:.60}; make it a turn with role and content")
        turns.append({"role": role, "content": content})
    while turns and turns[-1]["role"] != "user":  # a reply to the question is no part of it
        turns.pop()
    if not turns or not turns[-1]["content"].strip():
        raise ConfigError(f"task.question_column: {where} has no user turn that asks something; drop the row")
    if config.system_prompt is not None and turns[0]["role"] == "system":
        raise ConfigError(f"task.system_prompt: {where} has a system turn of its own; set task.system_prompt to null")
    return turns


def _text(row: Row, field: str, column: str) -> str:
    """A column as text, numbers in their decimal form: 0.00001, not 1e-05."""
    where, columns = row
    value: Any = columns
    for name in [column] if column in columns else column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            inner = [f"{outer}.{name}" for outer, held in columns.items() if isinstance(held, Mapping) for name in held]
            there = ", ".join([*map(str, columns), *inner])
            raise ConfigError(f"task.{field}: no column {column!r} in {where}; set task.{field} to one of {there}")
        value = value[name]
    written = value if isinstance(value, str) else ""
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and Decimal(value).is_finite():
        written = format(Decimal(str(value)), "f")
    if not written.strip():
        raise ConfigError(f"task.{field}: {column!r} is {value!r:.60} in {where}; make it a text or a number")
    return written


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
