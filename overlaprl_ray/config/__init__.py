"""Every setting of a run, a module per group; `cli` reads them, `identity` says which of them make a run what it is."""

from overlaprl_ray.config.experiment import ExperimentConfig, OutputConfig, ResourcesConfig, TaskConfig
from overlaprl_ray.config.grpo import TINY, GRPOConfig
from overlaprl_ray.config.model import ModelConfig, TinyConfig
from overlaprl_ray.config.pipeline import PipelineConfig
from overlaprl_ray.config.staleness import StalenessConfig

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
