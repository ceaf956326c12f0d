"""Which settings make a run what it is, and which may change without changing a bit of it.

config_hash(ExperimentConfig())           # twelve hex digits: the name of a sweep's trial
differences(saved_values, config)         # what keeps a run from being resumed with other settings
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from overlaprl_ray.config import ExperimentConfig

# where a run lies, how long it waits and what it holds on a device: none of these reaches a number of the run
NO_PART = (
    "output.",
    "pipeline.timeout_s",
    "pipeline.max_restarts",
    "task.reward_timeout_s",
    "resources.start_timeout_s",
    "resources.generator_gpu",
    "resources.reference_gpu",
    "resources.learner_gpu",
)


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def essentials(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a run's numbers depend on, by dotted name."""
    return {name: value for name, value in flatten(values) if not name.startswith(NO_PART)}


def config_hash(config: ExperimentConfig, but: str = "") -> str:
    """Twelve hex digits that two configurations share exactly when they describe the same run (`but` for a setting)."""
    found = essentials(config.model_dump(mode="json"))
    found.pop(but, None)
    text = json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(saved: dict[str, Any], config: ExperimentConfig) -> list[str]:
    """'name: old -> new' for each setting that a resumed run must not change; `grpo.num_steps` may.

    A setting that did not exist when the run was saved had the effect of its default.
    """
    defaults = essentials(ExperimentConfig().model_dump(mode="json"))
    old, new = {**defaults, **essentials(saved)}, essentials(config.model_dump(mode="json"))
    names = sorted({*old, *new} - {"grpo.num_steps"})
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]
