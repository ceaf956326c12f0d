"""Every prompt as the model will see it: the chat template takes it, its tokens exist, and a completion still fits.

Problems of a large data set are looked at in two parts: some before anything starts, the rest while actors load.

rest = check_prompts(config, task, encoder(config, tokenizer), window=2048, vocabulary=32_000)    # ConfigError
rest()
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import Problem, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST = 512  # problems looked at before a start: those with the longest texts
Encoder = Callable[[str], Sequence[int]]  # a prompt's token ids


def encoder(config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """What encodes a prompt as the generator does; `ConfigError` where the chat template, a program, refuses it."""
    from overlaprl_ray.workers.generator import (
        encode,  # with torch, for which the built-in model's checks need not wait
    )

    system, name = config.task.system_prompt, config.grpo.model_name

    def takes(prompt: str) -> bool:
        try:
            return bool(encode(tokenizer, prompt, None))
        except Exception:  # as below
            return False

    def encoded(prompt: str) -> Sequence[int]:
        try:
            return encode(tokenizer, prompt, system)
        except Exception as error:  # a template can raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if system is not None and takes(prompt):
            raise ConfigError(
                f"task.system_prompt = {system!r:.60}: the chat template of '{name}' refuses it ({reason:.200}); set "
                "it to null, or say the same in task.prompt_template"
            )
        raise ConfigError(
            f"grpo.model_name = '{name}': its chat template fails for prompt {prompt!r:.60} ({reason:.200}); correct "
            "chat_template.jinja (or chat_template in tokenizer_config.json) in the model's folder"
        )

    return encoded


def without_long_prompts(task: Task, most: int, encoded: Encoder) -> Task:
    """The task without the problems whose prompt has more than `most` tokens; its notes say how many those are."""

    def short(problems: Sequence[Problem], split: str) -> list[Problem]:
        kept = [problem for problem in problems if len(encoded(problem.prompt)) <= most]
        if not kept:
            raise ConfigError(f"task.max_prompt_tokens = {most}: every {split} prompt is longer; raise it")
        return kept

    train, heldout = short(task.train, "training"), short(task.heldout, "held-out")
    note = (
        f"task.max_prompt_tokens = {most} leaves out {len(task.train) - len(train)} of {len(task.train)} problems to "
        f"train on, {len(task.heldout) - len(heldout)} of {len(task.heldout)} held out"
    )
    return dataclasses.replace(task, train=train, heldout=heldout, notes=(*task.notes, note))


def check_prompts(
    config: ExperimentConfig, task: Task, encoded: Encoder, window: int | None, vocabulary: int
) -> Callable[[], None]:
    """Check the `FIRST` longest prompts; returns what checks the rest. Both raise `ConfigError`."""
    places = [
        (f"{split} problem {number}", problem.prompt)
        for split, problems in (("training", task.train), ("held-out", task.heldout))
        for number, problem in enumerate(problems, start=1)
    ]
    places.sort(key=lambda place: -len(place[1]))
    check = _Check(config, encoded, window, vocabulary, len(places))

    def rest() -> None:
        check.look(places[FIRST:])
        check.conclude()

    check.look(places[:FIRST])
    if check.too_long:
        rest()  # to say how many there are in all
    check.conclude()
    return rest


@dataclasses.dataclass
class _Check:
    config: ExperimentConfig
    encoded: Encoder
    window: int | None
    vocabulary: int
    total: int
    longest: tuple[int, str] = (0, "")  # tokens, prompt
    too_long: list[str] = dataclasses.field(default_factory=list)

    @property
    def room(self) -> float:
        """The most tokens that a prompt may have."""
        return float("inf") if self.window is None else self.window - self.config.grpo.max_new_tokens

    def look(self, places: Iterable[tuple[str, str]]) -> None:
        """Tokenize prompts; remember the longest, and which are too long."""
        for place, prompt in places:
            ids = self.encoded(prompt)
            if not ids:
                raise ConfigError(f"task.path: the prompt of {place}, {prompt!r:.60}, has no tokens; drop it")
            if max(ids) >= self.vocabulary:
                raise ConfigError(
                    f"grpo.model_name = '{self.config.grpo.model_name}': its tokenizer gives token {max(ids)} for "
                    f"{place}, {prompt!r:.60}, but the model embeds {self.vocabulary} tokens; save it with the "
                    "tokenizer that it was trained with, or with resize_token_embeddings"
                )
            self.longest = max(self.longest, (len(ids), prompt), key=lambda pair: pair[0])
            if len(ids) > self.room:
                self.too_long.append(place)

    def conclude(self) -> None:
        """Raise `ConfigError` if what was looked at does not fit."""
        grpo, (tokens, prompt) = self.config.grpo, self.longest
        if self.too_long:
            some = ", ".join(self.too_long[:5]) + (", ..." if len(self.too_long) > 5 else "")
            leave_out = f"set task.max_prompt_tokens to {self.room} to leave them out, " if self.room > 0 else ""
            raise ConfigError(
                f"grpo.max_new_tokens = {grpo.max_new_tokens}: {len(self.too_long)} of {self.total} prompts do not fit "
                f"the model's window of {self.window} beside it ({some}; the longest has {tokens} tokens: "
                f"{prompt!r:.60}); {leave_out}lower it, or use a model with a longer window"
            )
        rows = grpo.group_size if self.config.judges_groups else 1
        needed = rows * (tokens + grpo.max_new_tokens)
        if grpo.micro_batch_tokens is not None and grpo.micro_batch_tokens < needed:
            raise ConfigError(
                f"grpo.micro_batch_tokens = {grpo.micro_batch_tokens}: {'a group' if rows > 1 else 'a row'} can take "
                f"{needed} tokens (prompt of {tokens}, grpo.max_new_tokens of {grpo.max_new_tokens}"
                f"{f', {rows} rows judged together' if rows > 1 else ''}); raise it to that"
            )
