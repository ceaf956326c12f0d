"""What can be said of a model without torch and transformers: are its files there; facts of the built-in one.

check_model_files("some/model", "grpo.model_name")    # ConfigError in one line
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from overlaprl_ray.config import TINY, TaskConfig, TinyConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import Problem, arithmetic
from overlaprl_ray.tasks.hub import holds

BUILTIN = Path(__file__).parent / "builtin"  # the built-in model, as models/tiny.py makes it
CONTEXT, VOCABULARY = 512, 99  # its tokens, one a character
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # in one file, or in several


def is_folder_name(name: str) -> bool:
    """Whether a model's name means a folder: one that exists, or one written as a path."""
    return name.startswith((".", "/", "~")) or os.path.isdir(name)


def check_model_files(name: str, field: str) -> None:
    """Refuse a model whose configuration or weights are not there. Raises `ConfigError` naming `field`."""
    if name == TINY:
        return
    try:
        if is_folder_name(name):
            _check_folder(Path(os.path.expanduser(name)))
        else:
            _check_hub(name)
    except Exception as error:  # any JSON, any file, and the hub's HTTP client: no common type
        raise model_error(name, field, error) from error


def model_error(name: str, field: str, error: Exception) -> ConfigError:
    """The one line about a model that cannot be used."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
    return ConfigError(
        f"{field} = '{name}': cannot be loaded ({reason}); "
        f"give '{TINY}', a folder saved by save_pretrained, or a hub name"
    )


def _check_folder(folder: Path) -> None:
    """Configuration and weight files, by their headers and sizes alone."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ValueError("it holds a LoRA adapter alone; output.merge_lora has a run save a model to final/merged")
        raise ValueError("config.json is missing" if folder.is_dir() else "there is no such folder")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError("config.json names no model_type")
    whole, index = (folder / name for name in WEIGHTS)
    names = {whole.name}
    if index.is_file() and not whole.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        try:
            with safe_open(folder / name, "numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged: {error}") from error


def _check_hub(name: str) -> None:
    if not holds(name, "config.json"):
        raise ValueError("no such folder, and the hub or its local cache has no such model")
    if not any(holds(name, file) for file in WEIGHTS):
        raise ValueError("it has no *.safetensors weights")


# ---- the built-in model ----


def cache_folder() -> Path:
    """Where built models are kept between runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "overlaprl_ray"
    return Path(os.environ.get("OVERLAPRL_CACHE", default)).expanduser()


def builtin_parameters(config: TinyConfig) -> int:
    """How many parameters a built-in model of this shape has; its input and output embeddings are one."""
    return config.hidden * (VOCABULARY + 1) + config.layers * (16 * config.hidden**2 + 2 * config.hidden)


def is_packaged(config: TinyConfig, problems: Sequence[Problem]) -> bool:
    """Whether a run with these training problems starts from the packaged model."""
    if config != TinyConfig():
        return False
    seen = {(p.prompt, p.answer) for p in arithmetic.build(TaskConfig()).train}
    return seen <= {(p.prompt, p.answer) for p in problems}
