"""Every setting of a run, in `grpo`, `model` and `experiment`; `cli` reads them, `identity` says what a run is."""

from overlaprl_ray.config.experiment import (
    ExperimentConfig,
    OutputConfig,
    PipelineConfig,
    ResourcesConfig,
    StalenessConfig,
    TaskConfig,
)
from overlaprl_ray.config.grpo import TINY, GRPOConfig
from overlaprl_ray.config.model import ModelConfig, TinyConfig

__all__ = [
    "TINY",
    "ExperimentConfig",
    "GRPOConfig",
    "ModelConfig",
    "OutputConfig",
    "PipelineConfig",
    "ResourcesConfig",
    "StalenessConfig",
    "TaskConfig",
    "TinyConfig",
]
