"""The algorithm without the machinery: a run, serially, in one process, without Ray. Read this first.

It is also the oracle: with `schedule: exact`, `train` gives the same metrics and weights bit for bit in every mode.

    rows, weights = replay(ExperimentConfig(pipeline={"mode": "async", "lag": 4}))
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overlaprl_ray.algorithm.schedule import Schedule, evaluations
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.rollout import merge
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.workers.build import build_learner, build_reference, build_sampler
from overlaprl_ray.workers.generator import Sampler
from overlaprl_ray.workers.metrics import Evaluation, StepResult


def replay(
    config: ExperimentConfig,
    on_step: Callable[[StepResult], None] = lambda result: None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run a configuration; returns the metrics rows (without times and memory) and the final weights.

    Held-out evaluations are made for `on_evaluation` only. Raises `ConfigError`, `RunError`.
    """
    torch.set_num_threads(config.resources.threads)
    if config.pipeline.schedule != "exact":
        raise ConfigError("pipeline.schedule = 'latest': only 'exact' can be replayed; its weights follow from timing")
    count = config.resources.num_generators
    task = preflight(without_folder(config)).task
    learner = build_learner(config, task)
    samplers = [build_sampler(config, task, share=(index, count)) for index in range(count)]
    reference = build_reference(config, task, learner=learner) if config.grpo.beta else None
    schedule = Schedule.of(config)
    published = {0: (0, _copy(learner.weights()))}  # step -> (version, weights) after it
    to_evaluate = evaluations(config.grpo.num_steps, config.output.eval_every) if on_evaluation else []
    rows: list[dict[str, Any]] = []
    for step in range(1, config.grpo.num_steps + 1):
        if on_evaluation and step - 1 in to_evaluate:
            on_evaluation(_evaluate(samplers[0], step - 1, *published[step - 1]))
        source = schedule.weights_step(step)
        for sampler in samplers:
            sampler.engine.load_weights(*published[source])
        rollout = merge([sampler.rollout(step, source) for sampler in samplers])
        scores = reference.score(rollout) if reference else None
        result = learner.step(rollout, scores)
        rows.append(result.metrics)
        on_step(result)
        published[step] = (learner.version, _copy(learner.weights()))
        published = {made: kept for made, kept in published.items() if made >= schedule.oldest_step(step + 1)}
    if on_evaluation:
        on_evaluation(_evaluate(samplers[0], config.grpo.num_steps, *published[config.grpo.num_steps]))
    return rows, published[config.grpo.num_steps][1]


def without_folder(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration without an output folder, which a replay does not write to."""
    return config.model_copy(update={"output": config.output.model_copy(update={"dir": None})})


def _evaluate(sampler: Sampler, step: int, version: int, weights: dict[str, Tensor]) -> Evaluation:
    started = time.time()
    sampler.engine.load_weights(version, weights)
    accuracy, n = sampler.evaluate()
    return Evaluation(step, version, accuracy, n, (started, time.time()))


def _copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights.items()}
