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
from overlaprl_ray.config.grpo import GRPOConfig
from overlaprl_ray.errors import ConfigError, RunError

if TYPE_CHECKING:
    from overlaprl_ray.algorithm.staleness import StalenessDecision, StalenessScheduler
    from overlaprl_ray.runtime.replay import replay
    from overlaprl_ray.runtime.train import train

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
    "StalenessDecision": "overlaprl_ray.algorithm.staleness",
    "StalenessScheduler": "overlaprl_ray.algorithm.staleness",
    "replay": "overlaprl_ray.runtime.replay",
    "train": "overlaprl_ray.runtime.train",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'overlaprl_ray' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)
