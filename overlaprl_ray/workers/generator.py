"""From prompts to a scored `Rollout`: what a generator does, without Ray.

sampler = Sampler(config, task, tokenizer, engine)
rollout = sampler.rollout(batch=1, weights_step=0)
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from overlaprl_ray.algorithm.advantages import group_advantages
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.engines.base import Engine
from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.errors import BadBatch, ConfigError, RunError
from overlaprl_ray.rollout import Rollout, Span, pad_left
from overlaprl_ray.tasks import Problem, Task, columns_of, prompts_of_batch
from overlaprl_ray.tasks.problem import Turn
from overlaprl_ray.tasks.rewards import extracted, load_rewards, score
from overlaprl_ray.workers.memory import memory_gb
from overlaprl_ray.workers.watchdog import time_limit


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Turn], system_prompt: str | None) -> list[int]:
    """Token ids of a prompt: through the chat template where the tokenizer has one, else as plain text.

    An EOS that the tokenizer adds to the text is left out: nothing is to be said after it.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if tokenizer.chat_template is None:
        if len(turns) > 1:
            raise ConfigError(
                f"grpo.model_name: its tokenizer has no chat template for {turns!r:.200}; use a model with one, or "
                "questions of one turn"
            )
        text = turns[0]["content"]
        return tokenizer(text)["input_ids"][: -1 if _adds_eos(tokenizer, text) else None]
    messages = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    chat = tokenizer.apply_chat_template([*messages, *turns], add_generation_prompt=True, tokenize=False)
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def _adds_eos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    whole, own = (tokenizer(text, add_special_tokens=added)["input_ids"] for added in (True, False))
    return len(whole) > len(own) and whole[-1] == tokenizer.eos_token_id


def check_prompts(config: ExperimentConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task, with a notice where prompts are changed. ConfigError where the model would not see a part of them."""
    system, model, first = config.task.system_prompt, config.grpo.model_name, task.train[0]
    if system is not None and encode(tokenizer, first.asked, system) == encode(tokenizer, first.asked, None):
        raise ConfigError(
            f"task.system_prompt = {system!r:.60}: '{model}' would not see it, for its tokenizer has no chat template, "
            "or one that leaves system messages out; set it to null and write it into task.prompt_template"
        )
    if tokenizer.chat_template is not None or not _adds_eos(tokenizer, first.prompt):
        return task
    notice = f"notice: the tokenizer of '{model}' ends texts in an EOS (add_eos_token); prompts go without it"
    return replace(task, notices=(*task.notices, notice))


def _cells(values: list[Any], rows: int) -> list[Any]:
    """A logged column with a value per row, as text where JSON has no form for it."""
    plain = [v if isinstance(v, str | int | None) or (isinstance(v, float) and isfinite(v)) else str(v) for v in values]
    return [*plain, *[None] * rows][:rows]


class Sampler:
    """Makes batch i from (config, seed, i) and the weights its engine holds; nothing else goes in."""

    def __init__(
        self,
        config: ExperimentConfig,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        share: tuple[int, int] = (0, 1),
    ):
        self.config, self.task, self.tokenizer, self.engine = config, task, tokenizer, engine
        self.rewards = load_rewards(task.rewards)
        index, count = share  # this generator's place among the generators
        prompts = config.grpo.generated_prompts
        self.first, self.last = prompts * index // count, prompts * (index + 1) // count

    def rollout(self, batch: int, weights_step: int, load: Span = (0.0, 0.0)) -> Rollout:
        """This generator's share of a batch: whole groups, sampled with the weights held now."""
        started = time.time()
        grpo, seed = self.config.grpo, self.config.seed
        problems = prompts_of_batch(self.task.train, seed, batch, grpo.generated_prompts)[self.first : self.last]
        rows = [problem for problem in problems for _ in range(grpo.group_size)]
        first_row = self.first * grpo.group_size
        row_seeds = [(seed, batch, first_row + i) for i in range(len(rows))]
        encoded = {id(problem): self.encode(problem) for problem in problems}
        prompt_tokens = [encoded[id(problem)] for problem in rows]
        out = self.engine.generate(prompt_tokens, grpo.max_new_tokens, grpo.temperature, row_seeds)
        return self.scored(batch, weights_step, rows, prompt_tokens, out, started, load)

    def scored(
        self,
        batch: int,
        weights_step: int,
        rows: Sequence[Problem],
        prompt_tokens: Sequence[Sequence[int]],
        out: Generated,
        started: float,
        load: Span = (0.0, 0.0),
    ) -> Rollout:
        """The rollout of completions to these rows' problems, with their rewards."""
        grpo = self.config.grpo
        ids, texts = self._read(out)
        logged: dict[str, list[Any]] = {}
        fault = None
        try:
            total, parts = self._score(rows, ids, texts, batch - 1, f"batch {batch}", logged)
        except BadBatch as error:
            if self.config.pipeline.on_fault == "stop":
                raise
            fault, total = str(error), [0.0] * len(rows)
            parts = dict.fromkeys(self.rewards, total)
        rewards = torch.tensor(total, dtype=torch.float32)
        prompt_ids, prompt_mask = pad_left(prompt_tokens, self.engine.pad_id)
        return Rollout(
            batch=batch,
            version=self.engine.version,
            weights_step=weights_step,
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=out.ids,
            completion_mask=out.mask,
            logprobs=out.logprobs,
            rewards=rewards,
            reward_parts={name: torch.tensor(part, dtype=torch.float32) for name, part in parts.items()},
            advantages=group_advantages(rewards.double(), grpo.group_size, grpo.scale_rewards).float(),
            groups=torch.arange(self.first, self.last).repeat_interleave(grpo.group_size),
            finished=out.finished,
            prompts=[problem.prompt for problem in rows],
            completions=texts,
            answers=[problem.answer for problem in rows],
            extracted=[extracted(self.task.rewards[0], text) for text in texts],
            generate=(started, time.time()),
            load=load,
            memory_gb=memory_gb(self.engine.device),
            fault=fault,
            logged={name: _cells(values, len(rows)) for name, values in logged.items()},
        )

    def evaluate(self, step: int = 0) -> tuple[float, int]:
        """(greedy held-out accuracy after `step`, problems): the share with full marks, 1, from the first reward."""
        grpo, heldout = self.config.grpo, self.task.heldout
        right = 0
        for start in range(0, len(heldout), grpo.batch_rows):
            problems = heldout[start : start + grpo.batch_rows]
            out = self.engine.generate([self.encode(p) for p in problems], grpo.max_new_tokens, grpo.temperature)
            right += self._count_right(problems, *self._read(out), step)
        return right / len(heldout), len(heldout)

    def _count_right(self, problems: Sequence[Problem], ids: list[list[int]], texts: list[str], step: int) -> int:
        """Completions with full marks; one that cannot be scored ends the run, or with `on_fault: skip` is wrong."""
        try:
            _, parts = self._score(problems, ids, texts, step, "evaluation", {})
        except BadBatch:
            if self.config.pipeline.on_fault == "stop":
                raise
            if len(problems) == 1:
                return 0
            rows = [slice(row, row + 1) for row in range(len(problems))]
            return sum(self._count_right(problems[row], ids[row], texts[row], step) for row in rows)
        return sum(value >= 1.0 for value in next(iter(parts.values())))

    def encode(self, problem: Problem) -> list[int]:
        """Token ids of a problem's prompt."""
        return encode(self.tokenizer, problem.asked, self.config.task.system_prompt)

    def _read(self, out: Generated) -> tuple[list[list[int]], list[str]]:
        """Completions as token ids and as text; kept special tokens do not include the EOS that ended one."""
        skip = self.config.task.skip_special_tokens
        ids = [row[mask].tolist() for row, mask in zip(out.ids, out.mask, strict=True)]
        cut = [row[:-1] if finished and not skip else row for row, finished in zip(ids, out.finished, strict=True)]
        return ids, [str(self.tokenizer.decode(row, skip_special_tokens=skip)) for row in cut]

    def _score(
        self,
        problems: Sequence[Problem],
        ids: list[list[int]],
        texts: list[str],
        step: int,
        where: str,
        logged: dict[str, list[Any]],
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Rewards and their parts, after `step` steps; `logged` gets what functions log, a list per name.

        They run on this thread, an actor's main one, where time limits by signals work: see watchdog.py.
        """
        from transformers import TrainerState

        task, folder = self.config.task, self.config.output.dir
        prompts = [problem.asked for problem in problems]
        completions = [problem.reply(text) for problem, text in zip(problems, texts, strict=True)]
        columns = {**columns_of(problems), "completion_ids": ids}
        tools = {
            "trainer_state": TrainerState(global_step=step, max_steps=self.config.grpo.num_steps),
            "log_extra": lambda column, values: logged.setdefault(column, []).extend(values),
            "log_metric": lambda name, value: logged.update({name: [float(value)] * len(problems)}),
        }
        message = (
            f"{where}: scoring took more than task.reward_timeout_s = {task.reward_timeout_s:g} s (first prompt "
            f"{problems[0].prompt!r:.80}, completion {texts[0]!r:.80}); bound your reward's time, or raise the limit"
        )
        try:
            with time_limit(task.reward_timeout_s, message, Path(folder) if folder else None, str(self.first)):
                return score(self.rewards, task.reward_weights, prompts, completions, columns, tools)
        except RunError as error:
            raise type(error)(f"{where}: {error}") from error
        except SystemExit as error:
            raise RunError(f"{where}: a reward function ended with SystemExit: {error}") from error
