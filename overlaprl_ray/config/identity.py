"""What a run is: the settings that its numbers depend on, and the algorithm that computes them.

config_hash(ExperimentConfig())           # twelve hex digits: the name of a sweep's trial
differences(saved_values, config)         # what keeps a run from being resumed with other settings
check_run(Path("runs/x"))                 # refuses a run that another algorithm computed
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlaprl_ray.config import ExperimentConfig, GRPOConfig
from overlaprl_ray.errors import ConfigError

# Raise it whenever a default or a formula changes what a run computes: what another algorithm began is refused.
ALGORITHM = 3

# Where a run lies, how long it waits and what it holds on a device: none of these reaches a number of the run.
NO_PART = (
    "output.",
    "pipeline.timeout_s",
    "pipeline.max_restarts",
    "task.reward_timeout_s",
    "task.date",  # it may do so: then it is compared as data are
    "resources.start_timeout_s",
    "resources.generator_gpu",
    "resources.reference_gpu",
    "resources.learner_gpu",
)
# Settings of `grpo` that the defaults of others depend on.
DECISIVE = ("model_name", "micro_batch_tokens")


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted name, value)."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def essentials(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a run's numbers depend on, by dotted name. An engine not decided on stands for the default."""
    found = {name: value for name, value in flatten(values) if not name.startswith(NO_PART)}
    return found | ({"model.engine": "hf"} if found.get("model.engine") == "auto" else {})


def _defaults(config: ExperimentConfig) -> dict[str, Any]:
    """What the essentials would be without being given, beside the decisive settings of `config`."""
    decisive = {name: getattr(config.grpo, name) for name in DECISIVE}
    filled, plain = (
        essentials(ExperimentConfig(grpo=grpo).model_dump(mode="json"))
        for grpo in (GRPOConfig(**decisive), GRPOConfig())
    )
    return filled | {f"grpo.{name}": plain[f"grpo.{name}"] for name in DECISIVE}


def config_hash(config: ExperimentConfig, *but: str) -> str:
    """Twelve hex digits that two configurations share exactly when they describe the same run (`but` for settings).

    Settings at their default are left out, so that a setting which is added later renames no run.
    """
    defaults, settings = _defaults(config), essentials(config.model_dump(mode="json"))
    given = {name: value for name, value in settings.items() if name not in defaults or value != defaults[name]}
    text = json.dumps({"algorithm": ALGORITHM, **{k: v for k, v in given.items() if k not in but}}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def free_setting(config: ExperimentConfig) -> str:
    """What a resumed run may change: its number of steps, unless its learning rate depends on it."""
    return "grpo.num_steps" if config.grpo.lr_schedule == "constant" else ""


def differences(saved: dict[str, Any], config: ExperimentConfig) -> list[str]:
    """'name: old -> new' for each setting that a resumed run must not change.

    A setting that did not exist when the run was saved had the effect of its default.
    """
    old, new = _defaults(config) | essentials(saved), essentials(config.model_dump(mode="json"))
    names = sorted({*old, *new} - {free_setting(config)})
    pairs = [(name, old.get(name, "unset"), new.get(name, "unset")) for name in names]
    return [f"{name}: {before} -> {after}" for name, before, after in pairs if before != after]


def check_algorithm(number: int | None, what: str) -> None:
    """Refuse to continue what another algorithm computed; None stands for a version without numbers."""
    if number != ALGORITHM:
        raise ConfigError(
            f"{what}: computed by algorithm {number or 'without a number'}, this version has algorithm {ALGORITHM}; "
            "finish it with the version that began it, or start anew in another folder"
        )


def check_run(folder: Path) -> None:
    """Refuse to continue a folder's run if another algorithm computed it. A run without a row has no number yet."""
    try:
        number = json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("algorithm")
    except (OSError, ValueError, AttributeError):
        if not (folder / "metrics.jsonl").exists():
            return
        number = None
    check_algorithm(number, f"'{folder}'")
