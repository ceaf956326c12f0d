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
from overlaprl_ray.models.folders import find_models
from overlaprl_ray.rollout import batch_of
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.tasks import Task
from overlaprl_ray.workers.build import build_learner, build_reference, build_sampler
from overlaprl_ray.workers.generator import Sampler
from overlaprl_ray.workers.results import Evaluation, StepResult


def replay(
    config: ExperimentConfig,
    on_step: Callable[[StepResult], Any] | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    task: Task | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run a configuration; returns the metrics rows (without times and memory) and the final weights.

    Held-out evaluations are made for `on_evaluation` only. With a `task` the configuration counts as checked. Raises
    `ConfigError`, `RunError`.
    """
    if config.pipeline.schedule != "exact":
        raise ConfigError("pipeline.schedule = 'latest': only 'exact' can be replayed; its weights follow from timing")
    torch.set_num_threads(config.resources.threads)
    task = task or preflight(config.with_setting("output.dir", None)).task  # no folder: nothing is written
    schedule = Schedule.of(config)
    count, steps = config.resources.num_generators, config.grpo.num_steps
    models = find_models(config, task.train)
    learner = build_learner(config, models.policy)
    samplers = [build_sampler(config, task, models.policy, share=(index, count)) for index in range(count)]
    reference = build_reference(config, models.reference, learner=learner) if config.grpo.beta else None
    due = evaluations(steps, config.output.eval_every)
    published: dict[int, tuple[int, dict[str, Tensor]]] = {}  # step -> (version, weights) after it
    rows = []

    def publish(step: int) -> None:
        """Keep a copy of the weights, without those that no batch to come needs; evaluate them where that is due."""
        published[step] = (learner.version, {name: value.clone() for name, value in learner.weights().items()})
        for old in [s for s in published if s < schedule.oldest_step(step + 1)]:
            del published[old]
        if on_evaluation and step in due:
            on_evaluation(_evaluate(samplers[0], step, *published[step]))

    publish(0)
    for step in range(1, steps + 1):
        source, started = schedule.weights_step(step), time.time()
        for sampler in samplers:
            sampler.engine.load_weights(*published[source])
        load = (started, time.time())
        shares = [sampler.rollout(step, source, load) for sampler in samplers]
        rollout = batch_of(shares, config.grpo.num_prompts_per_step)
        scores = reference.score(rollout) if reference else None
        result = learner.step(rollout, scores)
        rows.append(result.metrics)
        if on_step:
            on_step(result)
        publish(step)
    return rows, published[steps][1]


def _evaluate(sampler: Sampler, step: int, version: int, weights: dict[str, Tensor]) -> Evaluation:
    started = time.time()
    sampler.engine.load_weights(version, weights)
    accuracy, n = sampler.evaluate(step)
    return Evaluation(step, version, accuracy, n, (started, time.time()))
