"""The algorithm without the machinery: a run, serially, in one process, without Ray. Read this first.

It is also the oracle: with `schedule: exact`, `train` gives the same metrics and weights bit for bit in every mode.

    rows, weights = replay(ExperimentConfig(pipeline={"mode": "async", "lag": 4}))
"""

from typing import Any

import torch
from torch import Tensor

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.parts import build_learner, build_reference, build_sampler
from overlaprl_ray.preflight import preflight
from overlaprl_ray.schedule import weights_step


def replay(config: ExperimentConfig) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run a configuration; returns the metrics rows (without times and memory) and the final weights."""
    torch.set_num_threads(config.resources.threads)
    task = preflight(config).task
    learner, sampler = build_learner(config, task), build_sampler(config, task)
    reference = build_reference(config, task) if config.grpo.beta else None
    published = {0: (0, _copy(learner.weights()))}  # step -> (version, weights) after it
    rows: list[dict[str, Any]] = []
    for step in range(1, config.grpo.num_steps + 1):
        source = weights_step(step, config.lag)
        sampler.engine.load_weights(*published[source])
        rollout = sampler.rollout(step, source)
        scores = reference.score(rollout) if reference else None
        rows.append(learner.step(rollout, scores).metrics)
        published[step] = (learner.version, _copy(learner.weights()))
        published.pop(source - 1, None)
    return rows, published[config.grpo.num_steps][1]


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights.items()}
