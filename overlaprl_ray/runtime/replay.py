"""The algorithm without the machinery: a run, serially, in one process, without Ray. Read this first.

It is also the oracle: with `schedule: exact`, `train` gives the same metrics and weights bit for bit in every mode, and
with `latest` too, given what timing decided, which the run has recorded.

    rows, weights = replay(ExperimentConfig(pipeline={"mode": "async", "lag": 4}))
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlaprl_ray.algorithm.schedule import Schedule, evaluations
from overlaprl_ray.algorithm.stream import StreamPlan
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.folders import find_models
from overlaprl_ray.rollout import Rollout, batch_of
from overlaprl_ray.runtime.fingerprint import dated
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.tasks import Task
from overlaprl_ray.workers.build import build_learner, build_reference, build_sampler
from overlaprl_ray.workers.generator import Sampler
from overlaprl_ray.workers.results import Evaluation, Report, StepResult
from overlaprl_ray.workers.stream import StreamSampler

OnEvaluation = Callable[[Evaluation], None] | None
Published = dict[int, tuple[int, dict[str, Tensor]]]  # step -> (version, weights) after it
Recorded = Sequence[int] | Mapping[int, int] | None


def replay(
    config: ExperimentConfig,
    on_step: Callable[[StepResult], Any] | None = None,
    on_evaluation: OnEvaluation = None,
    task: Task | None = None,
    schedule: Recorded = None,
    steps: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run a configuration; returns the metrics rows (without times and memory) and the final weights.

    Held-out evaluations are made for `on_evaluation` only. With a `task` the configuration counts as checked.
    `schedule` replaces the exact schedule by the record of a run: the step whose weights made each batch (column
    `weights_step`), or in a stream the ticks at which weights were taken over, by step (`weights_ticks`). `steps` ends
    the run early. Raises `ConfigError`, `RunError`.
    """
    if config.pipeline.schedule != "exact" and schedule is None:
        raise ConfigError(
            "pipeline.schedule = 'latest': its weights follow from timing; use exact, or give the record of a run, as "
            "train.py --replay FOLDER does"
        )
    torch.set_num_threads(config.resources.threads)
    config = dated(config)
    task = task or preflight(config.with_setting("output.dir", None)).task  # no folder: nothing is written
    models = find_models(config, task.train)
    learner = build_learner(config, models.policy)
    reference = build_reference(config, models.reference, learner=learner) if config.grpo.beta else None
    count = config.resources.num_generators
    samplers = [build_sampler(config, task, models.policy, share=(index, count)) for index in range(count)]
    source = (_Stream if config.pipeline.generation == "stream" else _Batches)(samplers, on_evaluation, schedule)
    published: Published = {}
    rows: list[dict[str, Any]] = []
    last = steps or config.grpo.num_steps

    def publish(step: int) -> None:
        """Keep a copy of the weights, without those that no batch to come needs."""
        published[step] = (learner.version, {name: value.clone() for name, value in learner.weights().items()})
        for old in [s for s in published if s < source.plan.oldest_step(step + 1)]:
            del published[old]

    publish(0)
    for step in range(1, last + 1):
        rollout = source.rollout(step, published)
        scores = reference.score(rollout) if reference else None
        result = learner.step(rollout, scores)
        rows.append(result.metrics)
        if on_step:
            on_step(result)
        publish(step)
    source.end(last, published)
    return rows, published[last][1]


class _Batches:
    """Rollouts batch after batch."""

    def __init__(self, samplers: list[Sampler], on_evaluation: OnEvaluation, recorded: Recorded):
        assert not isinstance(recorded, Mapping)
        self.samplers, config = samplers, samplers[0].config
        self.plan = Schedule.of(config, recorded or ())
        self.due = evaluations(config.grpo.num_steps, config.output.eval_every)
        self.on_evaluation, self.prompts = on_evaluation, config.grpo.num_prompts_per_step

    def rollout(self, batch: int, published: Published) -> Rollout:
        """The next batch, after the evaluation that is due before it."""
        self.end(batch - 1, published)
        source, started = self.plan.weights_step(batch), time.time()
        for sampler in self.samplers:
            sampler.engine.load_weights(*published[source])
        load = (started, time.time())
        return batch_of([sampler.rollout(batch, source, load) for sampler in self.samplers], self.prompts)

    def end(self, step: int, published: Published) -> None:
        """Evaluate the weights after a step, where that is due."""
        if self.on_evaluation is None or step not in self.due:
            return
        started, (version, weights) = time.time(), published[step]
        self.samplers[0].engine.load_weights(version, weights)
        accuracy, n = self.samplers[0].evaluate(step)
        self.on_evaluation(Evaluation(step, version, accuracy, n, (started, time.time())))


class _Stream:
    """Rollouts of a stream of groups."""

    def __init__(self, samplers: list[Sampler], on_evaluation: OnEvaluation, recorded: Recorded):
        config = samplers[0].config
        due = evaluations(config.grpo.num_steps, config.output.eval_every) if on_evaluation else ()
        assert recorded is None or isinstance(recorded, Mapping)
        self.stream = StreamSampler(samplers[0], StreamPlan.of(config, recorded), due)
        self.plan, self.on_evaluation = Schedule.of(config), on_evaluation

    def rollout(self, batch: int, published: Published) -> Rollout:
        """The next batch; evaluations are made where their weights are taken over."""
        rollout, report = self.stream.batch(batch, lambda step, wait: published[step])
        self._report(report)
        rollout.stream.pop("time/generator_wait")  # nobody waits here
        return rollout

    def end(self, step: int, published: Published) -> None:
        """Evaluate the weights that were not taken over any more."""
        self._report(self.stream.end(step, lambda step, wait: published[step]))

    def _report(self, report: Report) -> None:
        for done in report.evaluations:
            assert self.on_evaluation is not None
            self.on_evaluation(done)
