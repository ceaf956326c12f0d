"""Everything that can be known to be wrong before an actor starts or a byte is written.

ready = preflight(config)    # ConfigError in one line, or what the run needs
"""

import dataclasses
from collections.abc import Callable

import ray
import torch

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.architecture import check_cache
from overlaprl_ray.models.loading import check_model, check_tokenizer, context_window, load_tokenizer, published_bytes
from overlaprl_ray.models.lora import check_lora
from overlaprl_ray.models.tiny import cache_folder
from overlaprl_ray.runs.loggers import check_loggers
from overlaprl_ray.runtime.inputs import check_inputs, check_writable
from overlaprl_ray.runtime.prompts import check_lengths, encoder
from overlaprl_ray.runtime.resources import Plan, check_memory, plan_resources
from overlaprl_ray.tasks import Task
from overlaprl_ray.workers.memory import device_bytes


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What the checks had to load anyway, and what is left of them: `rest`, for the time in which actors load."""

    task: Task
    plan: Plan
    published_bytes: int  # of one set of weights
    rest: Callable[[], None]


def preflight(config: ExperimentConfig, resuming: bool = False, task: Task | None = None) -> Preflight:
    """Check output, models' files, task, rewards, resources and models, cheapest first. Raises `ConfigError`.

    `task`: what `check_inputs` returned, where it was called before.
    """
    task = task or check_inputs(config, resuming)
    check_loggers(config)
    plan = plan_resources(config, available_gpus(), device_bytes())
    published, rest = check_models(config, task)
    check_memory(plan, config, published)
    return Preflight(task, plan, published, rest)


def check_models(config: ExperimentConfig, task: Task) -> tuple[int, Callable[[], None]]:
    """Check models, and prompts against models. Returns the bytes of one set of weights, and what checks the rest."""
    name, other = config.grpo.model_name, config.model.reference if config.grpo.beta else None
    if TINY in (name, other):
        check_writable("OVERLAPRL_CACHE", cache_folder())
    model = check_model(name, "grpo.model_name", config.model.tiny)
    if config.model.engine != "vllm":
        check_cache(model, name)
    if config.model.lora_r:
        check_lora(config.model, model)
    tokenizer = load_tokenizer(name)
    check_tokenizer(tokenizer, model, name)
    window = context_window(model)
    if other:
        reference = check_model(other, "model.reference", config.model.tiny)
        if reference.vocab_size != model.vocab_size:
            raise ConfigError(
                f"model.reference = '{other}': its vocabulary differs from the policy's ({reference.vocab_size} tokens "
                f"against {model.vocab_size}); give a model of the same family"
            )
        window = min((w for w in (window, context_window(reference)) if w is not None), default=None)
    rest = check_lengths(config, task, encoder(config, tokenizer), window, model.vocab_size)
    return published_bytes(config, model), rest


def available_gpus() -> float:
    """GPUs that actors can get: the cluster's where Ray runs already, else this machine's."""
    if ray.is_initialized():
        return ray.cluster_resources().get("GPU", 0.0)
    return float(torch.cuda.device_count())


def check_store(config: ExperimentConfig, published: int) -> None:
    """The weights that a lag keeps alive must fit one node's object store. Only with Ray running is its size known."""
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
