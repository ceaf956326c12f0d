"""Everything that can be known to be wrong before an actor starts or a byte is written.

ready = preflight(config)    # ConfigError in one line, or what the run needs
"""

import dataclasses
import sys
from pathlib import Path

import yaml
from rich.console import Console

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.files import CONTEXT, VOCABULARY, builtin_parameters, cache_folder
from overlaprl_ray.runtime.fingerprint import check_inputs_kept, tokenizer_inputs
from overlaprl_ray.runtime.inputs import check_inputs, check_writable
from overlaprl_ray.runtime.prompts import check_lengths, encoder
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
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)  # of the models: see fingerprint.py


def preflight(config: ExperimentConfig, resuming: bool = False, task: Task | None = None) -> Preflight:
    """Check output, models' files, task, rewards, resources and models, cheapest first. Raises `ConfigError`.

    `task`: what `check_inputs` returned, where it was called before.
    """
    task = task or check_inputs(config, resuming)
    plan = resource_plan(config)
    return check_models(config, task, plan)


def check_models(config: ExperimentConfig, task: Task, plan: Plan) -> Preflight:
    """Check loggers, models, and prompts against models.

    For any but the built-in model this imports torch and transformers.
    """
    if config.output.wandb:
        from overlaprl_ray.runs.loggers import check_loggers

        check_loggers(config)
    name, other = config.grpo.model_name, config.model.reference if config.grpo.beta else None
    if TINY in (name, other):
        check_writable("OVERLAPRL_CACHE", cache_folder())
    is_chat = config.task.system_prompt is not None or task.train[0].turns
    if {name, other or name} == {TINY} and config.model.engine != "vllm" and not (config.model.lora_r or is_chat):
        check_lengths(config, task, lambda problem: [0] * len(problem.prompt), CONTEXT, VOCABULARY)
        published = builtin_parameters(config.model.tiny) * (4 if config.model.dtype == "float32" else 2)
        check_memory(plan, config, published)
        return Preflight(task, plan, published)
    from overlaprl_ray.models.architecture import check_cache, check_joinable
    from overlaprl_ray.models.loading import check_model, check_tokenizer, load_tokenizer, published_bytes
    from overlaprl_ray.models.lora import check_lora
    from overlaprl_ray.workers.generator import check_prompts

    model = check_model(name, "grpo.model_name", config.model.tiny)
    if config.model.engine != "vllm":
        check_cache(model, name)
    if config.pipeline.generation == "stream":
        check_joinable(model, name)
    if config.model.lora_r:
        check_lora(config.model, model)
    tokenizer = load_tokenizer(name, config.task.date)
    check_tokenizer(tokenizer, model, name)
    reference = check_model(other, "model.reference", config.model.tiny) if other else model
    if reference.vocab_size != model.vocab_size:
        raise ConfigError(
            f"model.reference = '{other}': its vocabulary differs from the policy's ({reference.vocab_size} tokens "
            f"against {model.vocab_size}); give a model of the same family"
        )
    windows = [getattr(each, "max_position_embeddings", None) for each in (model, reference)]
    window = min((tokens for tokens in windows if tokens is not None), default=None)
    check_lengths(config, task, encoder(config, tokenizer), window, model.vocab_size)
    task = check_prompts(config, task, tokenizer)
    published = published_bytes(config, model)
    check_memory(plan, config, published)
    inputs = tokenizer_inputs(tokenizer)
    if config.output.dir:
        check_inputs_kept(Path(config.output.dir), inputs)
    return Preflight(task, plan, published, inputs)


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


def dry_run(
    config: ExperimentConfig, console: Console | None = None, resuming: bool = False, task: Task | None = None
) -> Preflight:
    """Check everything and print the resolved configuration and the resource plan; start and write nothing."""
    config, engine = resolve_engine(config, available_gpus())
    ready = preflight(config, resuming, task)
    console = console or Console(soft_wrap=True)
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()
    problems = f"task: {len(ready.task.train)} problems to train on, {len(ready.task.heldout)} held out"
    for text in [settings, *(f"# {line}" for line in (problems, *ready.task.notices, *ready.plan.lines(), engine))]:
        console.print(text, highlight=False, markup=False, emoji=False)
    return ready
