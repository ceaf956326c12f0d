"""Everything that can be known to be wrong before an actor starts or a byte is written.

    ready = preflight(config)    # ConfigError in one line, or what the run needs
"""

import dataclasses
import os
from pathlib import Path

import ray
import torch
from transformers import PreTrainedTokenizerBase

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models import check_model, context_window, eos_ids, load_tokenizer
from overlaprl_ray.resources import Plan, plan_resources
from overlaprl_ray.rewards import load_rewards
from overlaprl_ray.sampler import encode
from overlaprl_ray.tasks import Task, build_task


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What the checks had to load anyway."""

    task: Task
    tokenizer: PreTrainedTokenizerBase
    plan: Plan


def preflight(config: ExperimentConfig) -> Preflight:
    """Check output, resources, task, rewards and model, cheapest first. Raises `ConfigError`."""
    check_output(config.output.dir)
    plan = plan_resources(config, available_gpus())
    task = build_task(config.task)
    load_rewards(task.rewards)
    if config.task.reward_weights is not None and len(config.task.reward_weights) != len(task.rewards):
        raise ConfigError(
            f"task.reward_weights = {config.task.reward_weights}: {len(task.rewards)} reward(s) in use; one weight each"
        )
    model_config = check_model(config.grpo.model_name, "grpo.model_name", config.model)
    tokenizer = load_tokenizer(config.grpo.model_name)
    eos_ids(model_config, tokenizer)
    if config.grpo.beta and config.model.reference:
        reference = check_model(config.model.reference, "model.reference", config.model)
        if reference.get_text_config().vocab_size != model_config.get_text_config().vocab_size:
            raise ConfigError(
                f"model.reference = '{config.model.reference}': its vocabulary differs from the policy's "
                f"({reference.vocab_size} against {model_config.vocab_size}); give a model of the same family"
            )
    check_lengths(config, task, tokenizer, context_window(model_config))
    return Preflight(task, tokenizer, plan)


def check_output(folder: str | None) -> None:
    """Refuse a folder that holds something: a run never writes over another."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"output.dir = '{folder}': holds another run or other files; give a new folder or remove it")
    parent = next(p for p in [path, *path.resolve().parents] if p.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"output.dir = '{folder}': '{parent}' cannot be written to; give another folder")


def available_gpus() -> float:
    """GPUs that actors can get: the cluster's where Ray runs already, else this machine's."""
    if ray.is_initialized():
        return ray.cluster_resources().get("GPU", 0.0)
    return float(torch.cuda.device_count())


def check_lengths(
    config: ExperimentConfig, task: Task, tokenizer: PreTrainedTokenizerBase, window: int | None
) -> None:
    """Every prompt, with the longest completion after it, must fit the model's window."""
    if window is None:
        return
    room = window - config.grpo.max_new_tokens
    for problem in (*task.train, *task.heldout):
        tokens = len(encode(tokenizer, problem.prompt, config.task.system_prompt))
        if tokens > room or tokens == 0:
            fault = "is empty" if tokens == 0 else f"has {tokens} tokens"
            raise ConfigError(
                f"grpo.max_new_tokens = {config.grpo.max_new_tokens}: prompt {problem.prompt[:60]!r} {fault} and the "
                f"model's window is {window}; lower it, drop the prompt, or use a model with a longer window"
            )
