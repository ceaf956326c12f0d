"""Everything that can be known to be wrong before an actor starts or a byte is written.

ready = preflight(config)    # ConfigError in one line, or what the run needs
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.grpo import TINY
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.files import CONTEXT, builtin_parameters, cache_folder
from overlaprl_ray.runtime.inputs import check_inputs, check_writable
from overlaprl_ray.runtime.resources import Plan, check_memory, plan_resources, resolve_engine
from overlaprl_ray.tasks import Task

# What a machine with a GPU has that torch can use: NVIDIA's (also under Windows' Linux) and AMD's.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What the checks had to load anyway."""

    task: Task
    plan: Plan
    published_bytes: int  # of one set of weights


def preflight(config: ExperimentConfig, resuming: bool = False, task: Task | None = None) -> Preflight:
    """Check output, models' files, task, rewards, resources and models, cheapest first. Raises `ConfigError`.

    `task`: what `check_inputs` returned, where it was called before.
    """
    task = task or check_inputs(config, resuming)
    plan = resource_plan(config)
    return Preflight(task, plan, check_models(config, task, plan))


def check_models(config: ExperimentConfig, task: Task, plan: Plan) -> int:
    """Check loggers, models, and prompts against models; returns the bytes of one set of published weights.

    For any but the built-in model this imports torch and transformers.
    """
    if config.output.wandb:
        from overlaprl_ray.runs.loggers import check_loggers

        check_loggers(config)
    names = {config.grpo.model_name, (config.grpo.beta and config.model.reference) or config.grpo.model_name}
    if TINY in names:
        check_writable("OVERLAPRL_CACHE", cache_folder())
    if names == {TINY} and config.model.engine != "vllm" and not config.model.lora_r:
        check_lengths(config, task, len, CONTEXT)
        published = builtin_parameters(config.model.tiny) * (4 if config.model.dtype == "float32" else 2)
        check_memory(plan, config, published)
        return published
    from overlaprl_ray.models.architecture import check_cache, check_joinable, check_logits
    from overlaprl_ray.models.loading import check_model, context_window, eos_ids, load_tokenizer, published_bytes
    from overlaprl_ray.models.lora import check_lora
    from overlaprl_ray.workers.generator import encode

    model_config = check_model(config.grpo.model_name, "grpo.model_name", config.model)
    check_logits(model_config, config.grpo.model_name, "grpo.model_name")
    if config.model.engine != "vllm":
        check_cache(model_config, config.grpo.model_name)
    if config.pipeline.generation == "stream":
        check_joinable(model_config, config.grpo.model_name)
    if config.model.lora_r:
        check_lora(config.model, model_config)
    tokenizer = load_tokenizer(config.grpo.model_name)
    eos_ids(model_config, tokenizer)
    window = context_window(model_config)
    if config.grpo.beta and config.model.reference:
        reference = check_model(config.model.reference, "model.reference", config.model)
        check_logits(reference, config.model.reference, "model.reference")
        vocabularies = [c.get_text_config().vocab_size for c in (reference, model_config)]
        if vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"model.reference = '{config.model.reference}': its vocabulary differs from the policy's "
                f"({vocabularies[0]} tokens against {vocabularies[1]}); give a model of the same family"
            )
        window = min((w for w in (window, context_window(reference)) if w is not None), default=None)
    check_lengths(config, task, lambda prompt: len(encode(tokenizer, prompt, config.task.system_prompt)), window)
    published = published_bytes(config, model_config)
    check_memory(plan, config, published)
    return published


def resource_plan(config: ExperimentConfig) -> Plan:
    """Who gets which share of what this machine, or Ray's cluster, has."""
    gpus = available_gpus()
    if not gpus:
        return plan_resources(config, gpus)
    from overlaprl_ray.workers.memory import device_bytes

    return plan_resources(config, gpus, device_bytes())


def available_gpus() -> float:
    """GPUs that actors can get: the cluster's where Ray runs already, else this machine's."""
    ray = sys.modules.get("ray")  # importing it takes time that a plan need not wait for
    if ray is not None and ray.is_initialized():
        return ray.cluster_resources().get("GPU", 0.0)
    if sys.platform == "linux" and not any(Path(device).exists() for device in GPU_DEVICES):
        return 0.0
    import torch

    return float(torch.cuda.device_count())


def check_store(config: ExperimentConfig, published: int) -> None:
    """The weights that a lag keeps alive must fit one node's object store. Only with Ray running is its size known."""
    import ray

    store = max(node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes() if node["Alive"])
    sets = config.lag + config.late_lag + 2
    needed = sets * published
    if needed > store:
        late = f" and late_lag = {config.late_lag}" if config.late_lag else ""
        raise ConfigError(
            f"pipeline.lag = {config.lag}{late}: {sets} sets of weights take {needed / 1e9:.3g} GB, but Ray's object "
            f"store has {store / 1e9:.3g}, so they would spill to disk; lower it, set model.dtype bfloat16 or "
            "model.lora_r, or start Ray with a larger --object-store-memory and name it in RAY_ADDRESS"
        )


def check_lengths(config: ExperimentConfig, task: Task, count_tokens: Callable[[str], int], window: int | None) -> None:
    """Every prompt, with the longest completion after it, must fit the model's window and a micro-batch."""
    grpo, longest = config.grpo, 0
    if window is None and grpo.micro_batch_tokens is None:
        return
    room = math.inf if window is None else window - grpo.max_new_tokens
    least = 0 if window is None else 1
    for problem in (*task.train, *task.heldout):
        tokens = count_tokens(problem.prompt)
        longest = max(longest, tokens)
        if not least <= tokens <= room:
            fault = "is empty" if tokens == 0 else f"has {tokens} tokens"
            raise ConfigError(
                f"grpo.max_new_tokens = {config.grpo.max_new_tokens}: prompt {problem.prompt[:60]!r} {fault} and the "
                f"model's window is {window}; lower it, drop the prompt, or use a model with a longer window"
            )
    rows = grpo.group_size if config.judges_groups else 1
    needed = rows * (longest + grpo.max_new_tokens)
    if grpo.micro_batch_tokens is not None and grpo.micro_batch_tokens < needed:
        raise ConfigError(
            f"grpo.micro_batch_tokens = {grpo.micro_batch_tokens}: {'a group' if rows > 1 else 'a row'} can take "
            f"{needed} tokens (prompt of {longest}, grpo.max_new_tokens of {grpo.max_new_tokens}"
            f"{f', {rows} rows judged together' if rows > 1 else ''}); raise it to that"
        )


def dry_run(
    config: ExperimentConfig, console: Console | None = None, resuming: bool = False, task: Task | None = None
) -> Preflight:
    """Check everything and print the resolved configuration and the resource plan; start and write nothing."""
    config, engine = resolve_engine(config, available_gpus())
    ready = preflight(config, resuming, task)
    console = console or Console(soft_wrap=True)
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()
    problems = f"task: {len(ready.task.train)} problems to train on, {len(ready.task.heldout)} held out"
    for text in [settings, f"# {problems}", *(f"# {line}" for line in [*ready.plan.lines(), engine])]:
        console.print(text, highlight=False, markup=False, emoji=False)
    return ready
