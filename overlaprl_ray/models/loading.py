"""Loading policies and tokenizers: the built-in one, a folder, or a hub name. Checks come first and cost no weights.

tokenizer, model = load_tokenizer(models.policy), load_model(models.policy)    # of folders.find_models
"""

import copy
import json
import os
from collections.abc import Mapping
from datetime import date
from typing import Any, TypeVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from overlaprl_ray.config import TINY, ExperimentConfig, TinyConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.architecture import check_kind, check_logits
from overlaprl_ray.models.files import model_error
from overlaprl_ray.models.tiny import tiny_config, tiny_tokenizer

disable_progress_bar()  # a bar per actor for a load of seconds would bury our own output
Module = TypeVar("Module", bound=torch.nn.Module)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_model(name: str, field: str, tiny: TinyConfig) -> Any:
    """The model's configuration, found without loading weights. Raises `ConfigError` naming `field`."""
    if name == TINY:
        return tiny_config(tiny)
    try:
        found = AutoConfig.from_pretrained(os.path.expanduser(name), trust_remote_code=False)
    except Exception as error:  # the hub, any JSON, any architecture's own checks: no common type
        raise model_error(name, field, error) from error
    check_kind(found, name, field)
    check_logits(found, name, field)
    return found


def published_bytes(config: ExperimentConfig, architecture: Any) -> int:
    """Size of the policy's weights as they are published, found without memory for them; 0 for adapters, small ones."""
    if config.model.lora_r:
        return 0
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture)
    except Exception as error:  # any architecture's own checks: no common type
        raise model_error(config.grpo.model_name, "grpo.model_name", error) from error
    return sum(parameter.numel() for parameter in model.parameters()) * DTYPES[config.model.dtype].itemsize


def load_tokenizer(name: str, day: date | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, left-padding; its pad token falls back to EOS, its own or the model's.

    With a `day` its chat template sees that one; without, as in the copy that a run saves, it asks the clock.
    """
    if name == TINY:
        return tiny_tokenizer()
    folder = os.path.expanduser(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    except Exception as error:  # a tokenizer's parser raises plain Exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"grpo.model_name = '{name}': no tokenizer ({reason}); save one beside the model") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or _model_eos(folder, tokenizer)
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"grpo.model_name = '{name}': its tokenizer has no pad token, and neither it nor the model's config.json "
            "an EOS token to pad with; set pad_token in its tokenizer_config.json"
        )
    if day and "strftime_now" in str(tokenizer.chat_template):
        tokenizer.chat_template = _on_day(day) + tokenizer.get_chat_template()
    return tokenizer


def _on_day(day: date) -> str:
    """What has a chat template's `strftime_now` tell of one day: a macro of that name, which comes before a global."""
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdDeFgGhHIjmMnpSuUVwWxXyY"]
    values = json.dumps({code: day.strftime(code) for code in codes})
    return (
        "{% macro strftime_now(format) %}{% set it = namespace(text=format) %}"
        f"{{% for code, value in {values}.items() %}}{{% set it.text = it.text.replace(code, value) %}}{{% endfor %}}"
        "{{ it.text }}{% endmacro %}\n"
    )


def _model_eos(folder: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token of the EOS id in a model's configuration, of the first where there are several."""
    ids = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "eos_token_id", None)
    first = ids[0] if isinstance(ids, list | tuple) else ids
    token: Any = None if first is None else tokenizer.convert_ids_to_tokens(first)
    return token  # None, too, for an id beyond the vocabulary


def load_model(folder: str, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The causal model of a folder or hub name, every dropout off: two forwards must agree."""
    architecture = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for key, value in vars(architecture).items():
        if "drop" in key and isinstance(value, float):
            setattr(architecture, key, 0.0)
    model = AutoModelForCausalLM.from_pretrained(folder, config=architecture, dtype=DTYPES[dtype], use_safetensors=True)
    return model.to(device).eval()  # type: ignore[arg-type]  # its decorator hides the signature


def cpu_copy(module: Module, values: Mapping[torch.nn.Parameter, torch.Tensor]) -> Module:
    """A float32 copy on the CPU, with other values for some parameters; not one more byte on the module's device."""
    # deepcopy takes these for copies that it has made already
    taken: dict[int, Any] = {
        id(p): torch.nn.Parameter(values.get(p, p).detach().to("cpu", copy=True), p.requires_grad)
        for p in module.parameters()
    }
    taken |= {id(buffer): buffer.to("cpu", copy=True) for buffer in module.buffers()}
    return copy.deepcopy(module, taken).float()


def eos_ids(model_config: Any, tokenizer: PreTrainedTokenizerBase, generation_config: Any = None) -> tuple[int, ...]:
    """Every token id that ends a completion, by model, generation settings and tokenizer together."""
    found: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        getattr(model_config, "eos_token_id", None),
        getattr(generation_config, "eos_token_id", None),
    ):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if not found:
        raise ConfigError("grpo.model_name: neither model nor tokenizer has an EOS token; set one in its config.json")
    return tuple(sorted(found))


def export_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have what is saved of a model stop where the run did: `generate` looks at the generation settings alone."""
    model.generation_config.eos_token_id = list(eos_ids(model.config, tokenizer, model.generation_config))


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model_config: Any, name: str) -> None:
    """Refuse a tokenizer whose padding the model cannot embed, or none of whose EOS tokens it can produce."""
    size = model_config.vocab_size
    if tokenizer.pad_token_id >= size:
        raise ConfigError(
            f"grpo.model_name = '{name}': its pad token {tokenizer.pad_token!r} has the id {tokenizer.pad_token_id}, "
            f"but the model embeds {size} tokens; set pad_token in its tokenizer_config.json to one of them"
        )
    ends = eos_ids(model_config, tokenizer)
    if min(ends) >= size:
        raise ConfigError(
            f"grpo.model_name = '{name}': the ids of its EOS tokens, {list(ends)}, are beyond the model's {size}, so "
            "that no completion would end; set eos_token_id in its config.json"
        )
