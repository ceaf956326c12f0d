"""The generator of a stream as an actor: its calls get references to weights, and each is fetched at its tick.

rollout, evaluations = generator.batch.options(num_returns=2).remote(3, {1: weights_1, 2: weights_2})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from overlaprl_ray.algorithm.schedule import evaluations
from overlaprl_ray.algorithm.stream import StreamPlan
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Rollout
from overlaprl_ray.runs.ray_metrics import during
from overlaprl_ray.runtime.actors import GeneratorActor
from overlaprl_ray.tasks import Task
from overlaprl_ray.workers.results import Evaluation

if TYPE_CHECKING:
    from overlaprl_ray.workers.stream import Weights


class StreamActor(GeneratorActor):
    """Decodes all the time, and keeps its running rows between calls. Call k returns what step k trains on."""

    def __init__(self, config: ExperimentConfig, task: Task, gpu: float, share: tuple[int, int]):
        super().__init__(config, task, gpu, share)
        from overlaprl_ray.workers.stream import StreamSampler

        self.timeout_s = config.pipeline.timeout_s
        due = evaluations(config.grpo.num_steps, config.output.eval_every)
        self.stream = StreamSampler(self.sampler, StreamPlan.of(config), due)

    @during("generate")
    def batch(self, number: int, published: dict[int, Any]) -> tuple[Rollout, list[Evaluation]]:
        """The next batch; `published` refers to all weights that can be due in this call, by step."""
        return self.stream.batch(number, self._weights(published))

    @during("evaluate")
    def end(self, last: int, published: dict[int, Any]) -> list[Evaluation]:
        """After the last batch: the evaluations that remain."""
        return self.stream.end(last, self._weights(published))

    def _weights(self, published: dict[int, Any]) -> Weights:
        """Weights by step, as they come. There is no cycle: step k needs only what call k has returned."""
        from overlaprl_ray.runtime.weights import received

        def weights(step: int, wait: bool) -> Any:
            if not ray.wait([published[step]], timeout=self.timeout_s if wait else 0)[0]:
                if not wait:
                    return None
                raise RunError(
                    f"timed out waiting for the weights after step {step} (raise pipeline.timeout_s if it is just slow)"
                )
            found = ray.get(published[step])
            return found.version, received(found)

        return weights
