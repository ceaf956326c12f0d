"""Every prompt as the model will see it: the chat template takes it, its tokens exist, and a completion still fits.

check_lengths(config, task, encoder(config, tokenizer), window=2048, vocabulary=32_000)    # ConfigError in one line
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import Problem, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoder = Callable[[Problem], Sequence[int]]  # the token ids of a problem's prompt


def encoder(config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """What encodes a prompt as the generator does; `ConfigError` where the chat template, a program, refuses it."""
    from overlaprl_ray.workers.generator import encode  # with torch

    system, name = config.task.system_prompt, config.grpo.model_name

    def attempt(problem: Problem, system: str | None) -> list[int] | str:
        try:
            return encode(tokenizer, problem.asked, system)
        except ConfigError:
            raise
        except Exception as error:  # a template can raise anything
            return f"{type(error).__name__}: {' '.join(str(error).split())}"

    def encoded(problem: Problem) -> Sequence[int]:
        ids = attempt(problem, system)
        if not isinstance(ids, str):
            return ids
        if system is not None and not isinstance(attempt(problem, None), str):
            raise ConfigError(
                f"task.system_prompt = {system!r:.60}: the chat template of '{name}' refuses it ({ids:.200}); set it "
                "to null, or say the same in task.prompt_template"
            )
        raise ConfigError(
            f"grpo.model_name = '{name}': its chat template fails for prompt {problem.prompt!r:.60} ({ids:.200}); "
            "correct chat_template.jinja (or chat_template in tokenizer_config.json) in the model's folder"
        )

    return encoded


def without_long_prompts(task: Task, most: int, encoded: Encoder) -> Task:
    """The task without the problems whose prompt has more than `most` tokens; a notice says how many those are."""
    train, heldout = ([p for p in split if len(encoded(p)) <= most] for split in (task.train, task.heldout))
    if not train or not heldout:
        raise ConfigError(f"task.max_prompt_tokens = {most}: nothing is left to train on, or held out; raise it")
    notice = (
        f"task.max_prompt_tokens = {most} leaves out {len(task.train) - len(train)} of {len(task.train)} problems to "
        f"train on, {len(task.heldout) - len(heldout)} of {len(task.heldout)} held out"
    )
    return dataclasses.replace(task, train=train, heldout=heldout, notices=(*task.notices, notice))


def check_lengths(config: ExperimentConfig, task: Task, encoded: Encoder, window: int | None, vocabulary: int) -> None:
    """Every prompt has tokens, all of which the model embeds, and leaves room for the longest completion."""
    places = [
        (problem, problem.where or f"{split} problem {number}")
        for split, problems in (("training", task.train), ("held-out", task.heldout))
        for number, problem in enumerate(problems, start=1)
    ]
    room = None if window is None else window - config.grpo.max_new_tokens
    tokens, longest, long = 0, "", []
    for problem, place in places:
        ids = encoded(problem)
        if not ids or max(ids) >= vocabulary:
            fault = f"has token {max(ids)}, but the model embeds {vocabulary}" if ids else "has no tokens"
            raise ConfigError(
                f"grpo.model_name = '{config.grpo.model_name}': {place}, {problem.prompt!r:.60}, {fault}; "
                f"{'give the tokenizer that the model was trained with' if ids else 'drop it'}"
            )
        if len(ids) > tokens:
            tokens, longest = len(ids), problem.prompt
        if room is not None and len(ids) > room:
            long.append(place)
    if long:
        leave_out = f"set task.max_prompt_tokens to {room} to leave them out, " if room and room > 0 else ""
        raise ConfigError(
            f"grpo.max_new_tokens = {config.grpo.max_new_tokens}: {len(long)} of {len(places)} prompts do not fit the "
            f"model's window of {window} beside it ({', '.join(long[:5])}; the longest has {tokens} tokens, "
            f"{longest!r:.60}); {leave_out}lower it, or use a model with a longer window"
        )
    _check_budget(config, tokens)


def _check_budget(config: ExperimentConfig, longest: int) -> None:
    """What is computed together must fit `grpo.micro_batch_tokens`."""
    grpo = config.grpo
    rows = grpo.group_size if config.judges_groups else 1
    needed = rows * (longest + grpo.max_new_tokens)
    if grpo.micro_batch_tokens is not None and grpo.micro_batch_tokens < needed:
        raise ConfigError(
            f"grpo.micro_batch_tokens = {grpo.micro_batch_tokens}: {'a group' if rows > 1 else 'a row'} can take "
            f"{needed} tokens (prompt of {longest}, grpo.max_new_tokens of {grpo.max_new_tokens}"
            f"{f', {rows} rows judged together' if rows > 1 else ''}); raise it to that"
        )
