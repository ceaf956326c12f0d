"""From prompts to a scored `Rollout`: what a generator does, without Ray.

sampler = Sampler(config, task, tokenizer, engine)
rollout = sampler.rollout(batch=1, weights_step=0)
"""

import threading
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from overlaprl_ray.algorithm.advantages import group_advantages
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.engines.base import Engine
from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.errors import BadBatch, RunError
from overlaprl_ray.rollout import Rollout, Span, pad_left
from overlaprl_ray.tasks import Problem, Task, columns_of, prompts_of_batch
from overlaprl_ray.tasks.rewards import extracted, load_rewards, score
from overlaprl_ray.workers.memory import memory_gb


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, system_prompt: str | None) -> list[int]:
    """Token ids of a prompt: through the chat template where the tokenizer has one, else as plain text."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    messages.append({"role": "user", "content": prompt})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
        encoded = {problem.prompt: self.encode(problem) for problem in problems}
        prompt_tokens = [encoded[problem.prompt] for problem in rows]
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
        grpo, texts = self.config.grpo, self._decode(out)
        fault = None
        try:
            total, parts = self._score(rows, texts, where=f"batch {batch}")
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
        )

    def evaluate(self) -> tuple[float, int]:
        """(greedy held-out accuracy, problems): the share with full marks, 1, from the first reward function."""
        grpo, heldout = self.config.grpo, self.task.heldout
        right = 0
        for start in range(0, len(heldout), grpo.batch_rows):
            problems = heldout[start : start + grpo.batch_rows]
            out = self.engine.generate([self.encode(p) for p in problems], grpo.max_new_tokens, grpo.temperature)
            right += self._count_right(problems, self._decode(out))
        return right / len(heldout), len(heldout)

    def _count_right(self, problems: Sequence[Problem], texts: list[str]) -> int:
        """Completions with full marks; one that cannot be scored ends the run, or with `on_fault: skip` is wrong."""
        try:
            _, parts = self._score(problems, texts, where="evaluation")
        except BadBatch:
            if self.config.pipeline.on_fault == "stop":
                raise
            if len(problems) == 1:
                return 0
            return sum(self._count_right([problem], [text]) for problem, text in zip(problems, texts, strict=True))
        return sum(value >= 1.0 for value in next(iter(parts.values())))

    def encode(self, problem: Problem) -> list[int]:
        """Token ids of a problem's prompt."""
        return encode(self.tokenizer, problem.prompt, self.config.task.system_prompt)

    def _decode(self, out: Generated) -> list[str]:
        rows = zip(out.ids, out.mask, strict=True)
        return [str(self.tokenizer.decode(ids[mask], skip_special_tokens=True)) for ids, mask in rows]

    def _score(
        self, problems: Sequence[Problem], texts: list[str], where: str
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Score in a thread, so that a reward function that hangs ends the run instead of stopping it for ever."""
        limit = self.config.task.reward_timeout_s
        prompts = [problem.prompt for problem in problems]
        result: list[tuple[list[float], dict[str, list[float]]]] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                weights = self.config.task.reward_weights
                result.append(score(self.rewards, weights, prompts, texts, columns_of(problems)))
            except BaseException as error:  # carried over to the caller's thread, sys.exit() too
                failure.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(limit)
        if failure:
            if isinstance(failure[0], RunError):
                raise type(failure[0])(f"{where}: {failure[0]}")
            raise RunError(f"{where}: a reward function ended with {type(failure[0]).__name__}: {failure[0]}")
        if not result:
            raise RunError(
                f"{where}: scoring took more than task.reward_timeout_s = {limit:g} s (first prompt "
                f"{prompts[0]!r:.80}, completion {texts[0]!r:.80}); bound your reward's time, or raise the limit"
            )
        return result[0]
