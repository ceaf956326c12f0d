"""The algorithm without the machinery: a run, serially, in one process, without Ray. Read this first.

It is also the oracle: with `schedule: exact`, `train` gives the same metrics and weights bit for bit in every mode.

    rows, weights = replay(ExperimentConfig(pipeline={"mode": "async", "lag": 4}))
"""

from typing import Any

import torch
from torch import Tensor

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.parts import build_learner, build_reference, build_sampler
from overlaprl_ray.preflight import preflight
from overlaprl_ray.rollout import merge
from overlaprl_ray.schedule import weights_step


def replay(config: ExperimentConfig) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run a configuration; returns the metrics rows (without times and memory) and the final weights."""
    torch.set_num_threads(config.resources.threads)
    if config.pipeline.schedule != "exact":
        raise ConfigError("pipeline.schedule = 'latest': only 'exact' can be replayed; its weights follow from timing")
    count = config.resources.num_generators
    task = preflight(without_folder(config)).task
    learner = build_learner(config, task)
    samplers = [build_sampler(config, task, share=(index, count)) for index in range(count)]
    reference = build_reference(config, task) if config.grpo.beta else None
    published = {0: (0, _copy(learner.weights()))}  # step -> (version, weights) after it
    rows: list[dict[str, Any]] = []
    for step in range(1, config.grpo.num_steps + 1):
        source = weights_step(step, config.lag)
        for sampler in samplers:
            sampler.engine.load_weights(*published[source])
        rollout = merge([sampler.rollout(step, source) for sampler in samplers])
        scores = reference.score(rollout) if reference else None
        rows.append(learner.step(rollout, scores).metrics)
        published[step] = (learner.version, _copy(learner.weights()))
        published.pop(source - 1, None)
    return rows, published[config.grpo.num_steps][1]


def without_folder(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration without an output folder, which a replay does not write to."""
    return config.model_copy(update={"output": config.output.model_copy(update={"dir": None})})


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights.items()}
