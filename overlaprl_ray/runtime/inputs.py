"""Everything that can be found wrong without torch, transformers and Ray: a slip should not wait for their imports.

task = check_inputs(config)    # ConfigError in one line, within a second or two; nothing is written
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.files import check_model_files
from overlaprl_ray.runs.files import LOCK
from overlaprl_ray.tasks import Task, build_task
from overlaprl_ray.tasks.reward_check import check_rewards


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
    check_importable(task.rewards)
    task = check_rewards(task, config.task)
    weights = config.task.reward_weights
    if weights is not None and len(weights) != len(task.rewards):
        raise ConfigError(
            f"task.reward_weights = {weights}: task {task.name} has {len(task.rewards)} reward(s); one weight each"
        )
    most = config.task.max_prompt_tokens
    return task if most is None else _without_long_prompts(config, task, most)


def _without_long_prompts(config: ExperimentConfig, task: Task, most: int) -> Task:
    from overlaprl_ray.models.loading import load_tokenizer  # with torch, for which most slips need not wait
    from overlaprl_ray.runtime.prompts import encoder, without_long_prompts

    return without_long_prompts(task, most, encoder(config, load_tokenizer(config.grpo.model_name)))


def check_importable(rewards: Sequence[str]) -> None:
    """Refuse functions of the program that is running: to an actor `__main__` is its own."""
    for name in rewards:
        module, _, function = name.partition(":")
        if module == "__main__":
            raise ConfigError(
                f"task.rewards: '{name}' is part of the running script or notebook, which actors cannot import; move "
                f"it to a module (in a notebook by a cell that begins with %%writefile my_rewards.py) and name it "
                f"my_rewards:{function}"
            )


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
