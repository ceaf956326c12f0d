"""A problem, a task, and how a row of data becomes a prompt. See `overlaprl_ray.tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlaprl_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, its answer, and every column of the row it came from (reward functions get them by name)."""

    prompt: str
    answer: str
    columns: Mapping[str, Any]


def check_text(text: str, where: str) -> str:
    """The text itself. ConfigError where it is no Unicode that could be written or tokenized (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"task.path: {where} holds text that is no Unicode ({error.reason}); mend it") from None
    return text


@dataclass(frozen=True)
class Task:
    """Problems to train on, others to evaluate on, the names of the rewards that judge both, and notices to be read."""

    name: str
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: tuple[str, ...]
    notices: tuple[str, ...] = ()  # said when a run starts


def render(template: str, columns: Mapping[str, Any], where: str) -> str:
    """`template` filled with a row's columns (str.format). ConfigError for any other column or an empty result."""
    try:
        prompt = template.format(**columns)
    except (LookupError, ValueError, AttributeError, TypeError) as error:  # all that a bad template can raise
        there = ", ".join(f"{{{name}}}" for name in columns)
        raise ConfigError(
            f"task.prompt_template: {template!r} does not fit {where} ({type(error).__name__}: {error}); "
            f"use {there}, and double any brace that is meant to stay: \\boxed{{{{}}}}"
        ) from error
    if not prompt.strip():
        raise ConfigError(f"task.prompt_template: {template!r} is an empty prompt for {where}; mend it or drop the row")
    return prompt
