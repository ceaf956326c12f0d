"""Puzzles made by reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760): `gym:<dataset>`, extra `gym`.

`task.gym` holds the dataset's own parameters, besides `size` (problems drawn, 2000 by default) and `seed` (0): both
belong to the task, not to the run, so that accuracies of runs can be compared. A question drawn twice counts once, and
the first `eval_size` questions are held out; none of the rest has the words of one of them in another order, as
`12 + 34` and `34 + 12`. Its own scorer judges: see gym_scores.py.

    build_task(TaskConfig(name="gym:chain_sum", gym={"max_terms": 2, "max_digits": 2})).train[0].answer  # "59"
"""

import dataclasses
import importlib.util
import json
import os
import re
from typing import Any

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks.gym_scores import Item, dataset_of
from overlaprl_ray.tasks.problem import Problem, Task, check_text, did_you_mean, render

PREFIX = "gym:"
DEFAULTS = {"seed": 0, "size": 2000}
NESTED = {"composite"}  # made of other datasets: parameters of another form
# They go through sets of strings, whose order differs between processes unless PYTHONHASHSEED is set (seen in 0.1.25).
HASH_ORDERED = {"isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
NUMBER = re.compile(r"-?\d+(\.\d+)?")


def build(config: TaskConfig) -> Task:
    """`size` problems of the dataset less the repeated ones, `eval_size` of them held out. ConfigError for a slip."""
    name = config.name.removeprefix(PREFIX)
    settings = {**DEFAULTS, **_checked(name, config.gym)}
    try:
        dataset = dataset_of(name, json.dumps(settings, sort_keys=True))
        items = {item["question"]: item for item in (dataset[i] for i in range(settings["size"]))}
    except Exception as error:  # the dataset's own checks are asserts, and a bad type fails anywhere in it
        reason = str(error) or type(error).__name__
        raise ConfigError(f"task.gym: {config.gym} does not fit {name} ({reason}); see its limits") from error
    problems = [_problem(config, Item(name, json.dumps(settings, sort_keys=True), item)) for item in items.values()]
    numbers = all(NUMBER.fullmatch(problem.answer) for problem in problems)
    rewards = ("gym_number" if numbers else "gym",)
    train, heldout = split(problems, config.eval_size)
    if not train:
        raise ConfigError(
            f"task.eval_size: {config.eval_size} leaves nothing to train on of the {len(items)} different problems in "
            f"{settings['size']} of {config.name}; make it smaller, or task.gym.size larger"
        )
    return Task(config.name, train, heldout, rewards)


def split(problems: list[Problem], eval_size: int) -> tuple[list[Problem], list[Problem]]:
    """(to train on, held out): questions of the same words are on one side; those that do not fit are left out."""
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for problem in problems:
        groups.setdefault(tuple(sorted(problem.columns["question"].split())), []).append(problem)
    heldout: list[Problem] = []
    train: list[Problem] = []
    for group in groups.values():
        if len(heldout) < eval_size:
            heldout.extend(group[: eval_size - len(heldout)])
        else:
            train.extend(group)
    return train, heldout


def _problem(config: TaskConfig, item: Item) -> Problem:
    """An item whose solutions are many has no answer of its own: then the text is empty, and the scorer knows."""
    where = f"{config.name}, item {item.entry.get('metadata', {}).get('source_index')}"
    columns = {"question": item.entry["question"].strip(), "gym": item}
    prompt = render(config.prompt_template or "{question}", columns, where)
    answer = item.entry["answer"]
    return Problem(check_text(prompt, where), check_text("" if answer is None else str(answer), where), columns)


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters, if dataset and all of them exist."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"task.name: {PREFIX}{name} needs reasoning-gym; pip install 'overlaprl_ray[gym]'")
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - NESTED)
    if name not in names:
        raise ConfigError(f"task.name: reasoning-gym has no dataset {name!r} for us{did_you_mean(name, names)}")
    if name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"task.name: {PREFIX}{name} draws other problems in every process, following Python's string hashes; "
            "set PYTHONHASHSEED=0 in the environment"
        )
    known = sorted({field.name for field in dataclasses.fields(DATASETS[name][1])})
    for key in given:
        if key not in known:
            raise ConfigError(f"task.gym.{key}: {name} has no such parameter{did_you_mean(str(key), known)}")
    for key, least in (("seed", 0), ("size", 1)):
        value = given.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**6:
            raise ConfigError(f"task.gym.{key} = {value!r:.60}: a whole number from {least} to 1000000")
    return given
