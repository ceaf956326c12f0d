"""Loading policies and tokenizers: the built-in one, a folder, or a hub name. Checks come first and cost no weights.

tokenizer = load_tokenizer(config.grpo.model_name)
model = load_model(config, config.grpo.model_name, task)
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import has_file
from transformers.utils.logging import disable_progress_bar

from overlaprl_ray.config import TINY, ExperimentConfig, ModelConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.hub import prefer_cache_when_unreachable
from overlaprl_ray.tasks import Task
from overlaprl_ray.tiny import ensure_tiny, tiny_config, tiny_tokenizer

disable_progress_bar()  # a bar per actor for a load of seconds would bury our own output
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # in one file, or in several
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_model(name: str, field: str, config: ModelConfig) -> Any:
    """The model's configuration, found without loading weights. Raises `ConfigError` naming `field`."""
    if name == TINY:
        return tiny_config(config.tiny)
    try:
        return _found(name)
    except Exception as error:  # the hub, any JSON, any architecture's own checks: no common type
        remedy = f"give '{TINY}', a folder saved by save_pretrained, or a hub name"
        raise ConfigError(f"{field} = '{name}': cannot be loaded ({_reason(error)}); {remedy}") from error


def _found(name: str) -> Any:
    folder = Path(local_path(name))
    local = folder.exists() or name.startswith((".", "/", "~"))
    if not local:
        prefer_cache_when_unreachable()
    elif not (folder / "config.json").is_file():
        raise ValueError("config.json is missing" if folder.is_dir() else "no such folder")
    found = AutoConfig.from_pretrained(str(folder) if local else name, trust_remote_code=False)
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"a {found.model_type} is no causal language model")
    if local:
        _check_weights(folder)
    elif not any(has_file(name, file, local_files_only=is_offline_mode()) for file in WEIGHTS):
        raise ValueError("it has no *.safetensors weights")
    return found


def local_path(name: str) -> str:
    """`name` with a leading ~ resolved; hub names are left as they are."""
    return os.path.expanduser(name)


def _check_weights(folder: Path) -> None:
    """Raise `ValueError` unless each weight file of the folder is there and whole, by its header and size alone."""
    whole, index = (folder / name for name in WEIGHTS)
    names = {whole.name}
    if index.is_file() and not whole.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        try:
            with safe_open(folder / name, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged: {error}") from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, left-padding; its pad token falls back to EOS."""
    if name == TINY:
        return tiny_tokenizer()
    folder = local_path(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    except Exception as error:  # a tokenizer's parser raises plain Exceptions
        reason = _reason(error)
        raise ConfigError(f"grpo.model_name = '{name}': no tokenizer ({reason}); save one beside the model") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(config: ExperimentConfig, name: str, task: Task, device: str = "cpu") -> PreTrainedModel:
    """The causal model `name` in the configured dtype, with every dropout off: two forwards must agree."""
    folder = str(ensure_tiny(config.model.tiny, task.train)) if name == TINY else local_path(name)
    architecture = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for key, value in vars(architecture).items():
        if "drop" in key and isinstance(value, float):
            setattr(architecture, key, 0.0)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=architecture, dtype=DTYPES[config.model.dtype], use_safetensors=True
    )
    return model.to(device).eval()  # type: ignore[arg-type]  # its decorator hides the signature


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


def context_window(model_config: Any) -> int | None:
    """Tokens a model can see, where its configuration says."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)
