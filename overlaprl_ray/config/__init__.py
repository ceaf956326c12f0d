"""Every setting of a run: `grpo` and `experiment` hold them, `cli` reads them, `identity` says what a run is."""

from overlaprl_ray.config.experiment import (
    ExperimentConfig,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    ResourcesConfig,
    StalenessConfig,
    TaskConfig,
    TinyConfig,
)
from overlaprl_ray.config.grpo import TINY, GRPOConfig

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
