"""A problem, a task, and how a row of data becomes a prompt. See `overlaprl_ray.tasks`."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlaprl_ray.errors import ConfigError

Turn = Mapping[str, str]  # role and content


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, its answer, and every column of the row it came from (reward functions get them by name)."""

    prompt: str
    answer: str
    columns: Mapping[str, Any]
    turns: tuple[Turn, ...] = ()  # where the data hold conversations: this one, up to the prompt, its last user turn
    where: str = field(default="", compare=False)  # the row's place, for messages

    @property
    def asked(self) -> str | list[Turn]:
        """The prompt as the data have it: a text, or role/content turns."""
        return [dict(turn) for turn in self.turns] or self.prompt

    def reply(self, text: str) -> str | list[Turn]:
        """A completion in the form of the prompt: a text, or the assistant's turn."""
        return [{"role": "assistant", "content": text}] if self.turns else text


def check_text(text: str, where: str) -> str:
    """The text itself. ConfigError where it is no Unicode that could be written or tokenized (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"task.path: {where} holds text that is no Unicode ({error.reason}); correct it") from None
    return text


def did_you_mean(name: str, names: list[str]) -> str:
    """The end of a message about an unknown name: the nearest of `names`, or all of them."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}"


@dataclass(frozen=True)
class Task:
    """Problems to train on, others to evaluate on, the names of the rewards that judge both, and notices to be read."""

    name: str
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: tuple[str, ...]
    notices: tuple[str, ...] = ()  # what a user should know about the data before the run starts


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
        raise ConfigError(f"task.prompt_template: {template!r} is an empty prompt for {where}; fix it or drop the row")
    return prompt
