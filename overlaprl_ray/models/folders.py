"""Where a run's models are, found once, in its driver: whatever computes is given a folder or a hub name.

models = find_models(config, task.train)
learner = build_learner(config, models.policy)
"""

import dataclasses
import json
import os
from collections.abc import Sequence

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.models.files import BUILTIN, is_packaged
from overlaprl_ray.tasks import Problem


@dataclasses.dataclass(frozen=True)
class Models:
    """Where a run's models are: folders or hub names."""

    policy: str
    reference: str


def find_models(config: ExperimentConfig, problems: Sequence[Problem]) -> Models:
    """The run's models. To find the built-in one can mean to build it, so checks come first."""

    def place(name: str) -> str:
        if name != TINY:
            return os.path.expanduser(name)
        if is_packaged(config.model.tiny, problems):
            return str(BUILTIN)
        from overlaprl_ray.models.tiny import tiny_folder  # with torch

        return str(tiny_folder(config.model.tiny, problems, config.resources.threads))

    policy = place(config.grpo.model_name)
    other = config.model.reference if config.grpo.beta else None
    return Models(policy, policy if other is None else place(other))


def describe_start(folder: str) -> str:
    """Which weights a run of the built-in model begins with, in a line."""
    if folder != str(BUILTIN):
        return f"built-in model: warm-started for this task, kept in {folder}"
    recipe = json.loads((BUILTIN / "recipe.json").read_text(encoding="utf-8"))
    return f"built-in model: {BUILTIN / 'model.safetensors'}, sha256 {recipe['sha256'][:12]}"
