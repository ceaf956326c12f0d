"""Everything that can be found wrong without torch, transformers and Ray: a slip should not wait for their imports.

task = check_inputs(config)    # ConfigError in one line, within a second or two; nothing is written
"""

import importlib.util
import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from overlaprl_ray.checks.hub import holds, prefer_cache_when_unreachable
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.files import LOCK
from overlaprl_ray.grpo_config import TINY
from overlaprl_ray.rewards import load_rewards
from overlaprl_ray.tasks import Task, build_task

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # in one file, or in several


def check_inputs(config: ExperimentConfig, resuming: bool = False) -> Task:
    """Check output folder, models' files, task and rewards. Raises `ConfigError`; returns the task."""
    check_output(config.output.dir, resuming)
    if config.model.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "model.engine = 'vllm': vLLM is not installed; pip install 'overlaprl_ray[vllm]' (on a CPU see "
            "scripts/check_vllm.sh), or use hf"
        )
    check_model_files(config.grpo.model_name, "grpo.model_name")
    if config.grpo.beta and config.model.reference is not None:
        check_model_files(config.model.reference, "model.reference")
    task = build_task(config.task)
    load_rewards(task.rewards)
    weights = config.task.reward_weights
    if weights is not None and len(weights) != len(task.rewards):
        raise ConfigError(
            f"task.reward_weights = {weights}: task {task.name} has {len(task.rewards)} reward(s); one weight each"
        )
    return task


def check_output(folder: str | None, resuming: bool = False) -> None:
    """Refuse a folder that holds something, for a run never writes over another, and one that cannot be made."""
    if folder is None:
        return check_writable("output.dir (null)", Path("runs"))
    path = Path(os.path.expanduser(folder))
    check_writable(f"output.dir = '{folder}'", path)
    if path.exists() and not resuming and any(found.name != LOCK for found in path.iterdir()):
        raise ConfigError(
            f"output.dir = '{folder}': holds another run or other files; give a new folder, or --resume '{folder}'"
        )


def check_writable(setting: str, folder: Path) -> None:
    """Refuse a folder that is none, or that could neither be written to nor made."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        fault = "cannot be written to" if nearest.is_dir() else "is no folder"
        if nearest.is_dir() and os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            return
    except (OSError, ValueError) as error:  # too long a name; a null byte
        nearest, fault = folder, f"is no path ({error})"
    raise ConfigError(f"{setting}: '{nearest}' {fault}; give another folder")


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
    prefer_cache_when_unreachable()
    if not holds(name, "config.json"):
        raise ValueError("no such folder, and the hub or its local cache has no such model")
    if not any(holds(name, file) for file in WEIGHTS):
        raise ValueError("it has no *.safetensors weights")
