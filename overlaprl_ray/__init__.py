"""Asynchronous GRPO on one GPU: overlapped, staleness-aware, and replayable bit for bit.

Names are loaded when first used, so that a look at a configuration does not wait for torch and Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlaprl_ray.config import (
    ExperimentConfig,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    ResourcesConfig,
    StalenessConfig,
    TaskConfig,
)
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.grpo_config import GRPOConfig

if TYPE_CHECKING:
    from overlaprl_ray.replay import replay
    from overlaprl_ray.run import train
    from overlaprl_ray.staleness import StalenessDecision, StalenessScheduler

__all__ = [
    "ConfigError",
    "ExperimentConfig",
    "GRPOConfig",
    "ModelConfig",
    "OutputConfig",
    "PipelineConfig",
    "ResourcesConfig",
    "RunError",
    "StalenessConfig",
    "StalenessDecision",
    "StalenessScheduler",
    "TaskConfig",
    "replay",
    "train",
]

_LAZY = {
    "StalenessDecision": "overlaprl_ray.staleness",
    "StalenessScheduler": "overlaprl_ray.staleness",
    "replay": "overlaprl_ray.replay",
    "train": "overlaprl_ray.run",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'overlaprl_ray' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)
