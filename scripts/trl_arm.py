"""TRL's GRPOTrainer on the work of an `ExperimentConfig`: the same prompts in the same order, the same rewards.

Nothing is logged or saved, and one optimizer update covers a whole batch, as ours does. Held-out accuracy comes from
our own evaluation, on its own copy of the weights, with the clock standing still.

    track = run_trl(Job("trl", 1, None, config, every=10, target=0.6))
"""

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from arm import Job
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from overlaprl_ray.algorithm.schedule import learning_rate
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.loading import load_tokenizer
from overlaprl_ray.tasks import Problem, Task, build_task, columns_of, prompts_of_batch
from overlaprl_ray.tasks.rewards import load_rewards, score, text_of
from overlaprl_ray.workers.build import build_sampler
from overlaprl_ray.workers.generator import encode

# settings that TRL has under the same name
SAME = ("adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "temperature", "beta", "use_bias_correction_kl",
        "loss_type")  # fmt: skip


def trl_settings(config: ExperimentConfig, bf16: str | None, steps: int) -> dict[str, Any]:
    """Keyword arguments of TRL's `GRPOConfig` for the same algorithm. `ConfigError` for what TRL does otherwise.

    `bf16`: "autocast" keeps float32 weights as our optimizer does; "weights" holds all in bfloat16, which is faster and
    loses small updates; None computes in float32.
    """
    grpo = config.grpo
    micro = grpo.micro_batch_size or grpo.batch_rows
    _refuse(config, micro)
    return {
        **{name: getattr(grpo, name) for name in SAME},
        "learning_rate": grpo.lr,
        "lr_scheduler_type": "constant",  # the rate of each step is set by `Clock`
        "adam_epsilon": grpo.adam_eps,
        "optim": "adamw_torch_fused",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": grpo.batch_rows // micro,
        "num_generations": grpo.group_size,
        "max_completion_length": grpo.max_new_tokens,
        "top_p": 1.0,
        "top_k": 0,
        "epsilon": grpo.clip_eps,
        # of cispo it is the cap itself
        "epsilon_high": grpo.trust_region[1] if grpo.loss_type == "cispo" else grpo.clip_eps_high,
        "delta": grpo.dual_clip,
        "importance_sampling_level": grpo.importance_level,
        "scale_rewards": "group" if grpo.scale_rewards else "none",
        "num_iterations": 1,
        "shuffle_dataset": False,
        "max_steps": steps,
        "seed": config.seed,
        "bf16": bf16 == "autocast",
        "model_init_kwargs": {"dtype": "bfloat16" if bf16 == "weights" else "float32"},
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "use_vllm": False,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _refuse(config: ExperimentConfig, micro: int) -> None:
    """What cannot be compared, because TRL has no such thing or another one of the same name."""
    grpo = config.grpo
    only = {
        "grpo.oversample": (grpo.oversample, 1.0),
        "grpo.num_minibatches": (grpo.num_minibatches, 1),
        "grpo.num_iterations": (grpo.num_iterations, 1),
        "grpo.correction": (grpo.correction, "none"),
        "grpo.kl_penalty": (grpo.kl_penalty, "k3"),
        "grpo.micro_batch_tokens": (grpo.micro_batch_tokens, None),
        "model.lora_r": (config.model.lora_r, 0),
        "model.reference": (config.model.reference, None),
    }
    if grpo.clip_eps is None:
        raise ConfigError("grpo.clip_eps = null: TRL's arm always clips; give a range")
    if grpo.beta and grpo.use_bias_correction_kl and grpo.importance_level == "sequence":
        raise ConfigError("grpo.importance_level = sequence: TRL corrects the penalty by the row's ratio; set beta 0")
    for name, (value, wanted) in only.items():
        if value != wanted:
            raise ConfigError(f"{name} = {value}: TRL's arm can only do {'null' if wanted is None else wanted}")
    if grpo.batch_rows % micro:
        raise ConfigError(f"grpo.micro_batch_size = {micro}: TRL's arm needs a divisor of {grpo.batch_rows} rows")


def trl_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem, system_prompt: str | None) -> Any:
    """A problem as TRL takes it: a conversation where the tokenizer has a chat template, else plain text."""
    if tokenizer.chat_template is None:
        return problem.prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return [*system, {"role": "user", "content": problem.prompt}]


def check_prompts(
    trainer: Any, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], system_prompt: str | None
) -> None:
    """Raise `RunError` unless TRL turns every problem into the very tokens that our generator starts from."""
    different = list({problem.prompt: problem for problem in problems}.values())
    theirs, _, _ = trainer._tokenize_prompts([trl_prompt(tokenizer, p, system_prompt) for p in different])
    for problem, other in zip(different, theirs, strict=True):
        own = encode(tokenizer, problem.asked, system_prompt)
        if own != list(other):
            raise RunError(f"prompt {problem.prompt!r:.80}: {own} here, {other} in TRL; they would do different work")


class Clock(TrainerCallback):
    """Notes when each step ended, and evaluates every so many steps with the clock standing still."""

    def __init__(self, job: Job, task: Task):
        self.job, self.grpo = job, job.config.grpo
        self.sampler = build_sampler(job.config, task, self.grpo.model_name) if job.every else None
        self.ends: list[float] = []
        self.evaluations: list[tuple[int, float]] = []
        self.zero = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first batch's generation is about to begin: zero. The policy as it starts is evaluated before that."""
        if state.global_step == 0:
            self._evaluate(0, kwargs["model"])
            self.zero = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Our learning rate of this step: Hugging Face's schedules begin at 0."""
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = learning_rate(state.global_step + 1, self.grpo)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights after a step exist; stop at the target, or after as many seconds as the other arm had."""
        now, step = time.perf_counter(), state.global_step
        self.ends.append(now - self.zero)
        job = self.job
        last = step == args.max_steps or (job.seconds is not None and self.ends[-1] >= job.seconds)
        if job.every and (last or step % job.every == 0):
            accuracy = self._evaluate(step, kwargs["model"])
            last = last or (job.target is not None and accuracy >= job.target)
            self.zero += time.perf_counter() - now
        control.should_training_stop = last

    def _evaluate(self, step: int, model: Any) -> float:
        if self.sampler is None:
            return 0.0
        self.sampler.engine.load_weights(step, {name: p.detach() for name, p in model.named_parameters()})
        accuracy, _ = self.sampler.evaluate()
        self.evaluations.append((step, accuracy))
        return accuracy


class Reward:
    """The task's rewards, called as ours are, on problems by their place in the stream; notes tokens and means."""

    __name__ = "task"

    def __init__(self, config: ExperimentConfig, task: Task, problems: Sequence[Problem]):
        self.functions, self.weights, self.problems = load_rewards(task.rewards), config.task.reward_weights, problems
        self.tokens: list[int] = []
        self.means: list[float] = []

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], place: list[int], **_: Any) -> Any:
        """One number per completion."""
        asked = [self.problems[i] for i in place]
        texts = [text_of(completion) for completion in completions]
        total, _ = score(self.functions, self.weights, [p.prompt for p in asked], texts, columns_of(asked))
        self.tokens.append(sum(map(len, completion_ids)))
        self.means.append(sum(total) / len(total))
        return total


def run_trl(job: Job) -> dict[str, Any]:
    """Train with TRL in this process; the track: per step seconds, tokens and mean reward; (step, accuracy) pairs."""
    torch.set_num_threads(job.threads)
    config = job.config
    task, tokenizer = build_task(config.task), load_tokenizer(config.grpo.model_name, config.task.date)
    steps = config.grpo.num_steps if job.seconds is None else 20 * config.grpo.num_steps
    count = config.grpo.num_prompts_per_step
    problems = [p for batch in range(1, steps + 1) for p in prompts_of_batch(task.train, config.seed, batch, count)]
    prompts = [trl_prompt(tokenizer, problem, config.task.system_prompt) for problem in problems]
    clock, reward = Clock(job, task), Reward(config, task, problems)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=config.grpo.model_name,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=scratch, **trl_settings(config, job.bf16, steps)),
            train_dataset=Dataset.from_dict({"prompt": prompts, "place": list(range(len(prompts)))}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        check_prompts(trainer, tokenizer, problems, config.task.system_prompt)
        trainer.train()
    return {"ends": clock.ends, "tokens": reward.tokens, "rewards": reward.means, "evaluations": clock.evaluations}
