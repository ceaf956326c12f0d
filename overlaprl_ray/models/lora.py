"""LoRA (arXiv 2106.09685) through `peft`: the model's own weights stay as they are, small adapters beside them learn.

The adapter goes into the model in place: it stays the Hugging Face model that everything else knows, with `lora_A` and
`lora_B` among its parameters, and only these trainable. B starts at 0, so that the policy starts as its base; A is
drawn from the run's seed. There is no dropout.

    adapter = add_adapter(config.model, config.seed, model)
    with adapter.disable_adapter(): ...      # the base alone: a reference without a second model
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from overlaprl_ray.config import ModelConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.loading import cpu_copy

if TYPE_CHECKING:
    from peft import PeftModel


def add_adapter(config: ModelConfig, seed: int, model: PreTrainedModel) -> "PeftModel":
    """Put an adapter of rank `model.lora_r` into the model and freeze the rest; returns the handle to switch and save.

    Adapters are float32 in a bfloat16 model too: they are what the optimizer moves.
    """
    from peft import LoraConfig, get_peft_model

    rank = config.lora_r
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if config.lora_alpha is None else config.lora_alpha,
        target_modules=config.lora_target,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, settings)


def saver(adapter: "PeftModel") -> Callable[[str | Path], None]:
    """What writes the adapter as it is now, as a PEFT folder, though it is trained on meanwhile."""
    state = {name: p.detach().to("cpu", copy=True) for name, p in adapter.named_parameters() if p.requires_grad}

    def save(folder: str | Path) -> None:
        adapter.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)

    return save


def merged_copy(adapter: "PeftModel") -> PreTrainedModel:
    """A plain model in float32 on the CPU whose weights are base + adapter; it takes no memory of the adapter's GPU."""
    model: PreTrainedModel = cpu_copy(adapter, {}).merge_and_unload(safe_merge=True)
    model.config.dtype = torch.float32
    return model


def check_lora(config: ModelConfig, architecture: Any) -> None:
    """Refuse what cannot be adapted, by the model's configuration alone. Raises `ConfigError`."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f'model.lora_r = {config.lora_r}: peft is not installed; pip install "overlaprl_ray[lora]", or set it to 0'
        )
    if config.lora_target == "all-linear":
        return
    with torch.device("meta"):  # modules without memory
        body = AutoModelForCausalLM.from_config(architecture).base_model
    linear = {
        n.rpartition(".")[2] for n, module in body.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)
    }
    unknown = sorted({*config.lora_target} - linear)
    if unknown or not config.lora_target:
        raise ConfigError(
            f"model.lora_target = {config.lora_target}: {unknown[0] if unknown else 'nothing'} is no linear layer of "
            f"the model's body; give some of {', '.join(sorted(linear))}, or all-linear"
        )
