"""A stream's actors: the generator's calls get references to weights, and each is fetched at its tick.

rollout, report = generator.batch.options(num_returns=2).remote(3, {1: weights_1, 2: weights_2})
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from overlaprl_ray.algorithm.schedule import evaluations
from overlaprl_ray.algorithm.stream import StreamPlan
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Rollout
from overlaprl_ray.runs.ray_metrics import during
from overlaprl_ray.runtime.actors import GeneratorActor, LearnerActor
from overlaprl_ray.workers.results import Report

if TYPE_CHECKING:
    from overlaprl_ray.workers.stream import Weights


class StreamActor(GeneratorActor):
    """Decodes all the time, and keeps its running rows between calls. Call k returns what step k trains on."""

    def __init__(self, config: ExperimentConfig, *arguments: Any):
        super().__init__(config, *arguments)
        self.config = config

    def start(self, record: dict[int, int], settled: int, state: Any, published: dict[int, Any]) -> None:
        """Begin, or go on from a state. In the first `settled` batches weights come when the `record` says."""
        from overlaprl_ray.workers.stream import StreamSampler

        due = evaluations(self.config.grpo.num_steps, self.config.output.eval_every)
        self.stream = StreamSampler(self.sampler, StreamPlan.of(self.config, record, settled), due)
        if state is not None:
            self.stream.load(state, self._weights(published))

    @during("generate")
    def batch(self, number: int, published: dict[int, Any]) -> tuple[Rollout, Report]:
        """The next batch; `published` refers to all weights that can be due in this call, by step."""
        return self.stream.batch(number, self._weights(published))

    @during("evaluate")
    def end(self, last: int, published: dict[int, Any]) -> Report:
        """After the last batch: the evaluations that remain."""
        return self.stream.end(last, self._weights(published))

    def _weights(self, published: dict[int, Any]) -> Weights:
        """Weights by step, as they come. There is no cycle: step k needs only what call k has returned."""
        from overlaprl_ray.runtime.weights import received

        def weights(step: int, wait: bool) -> Any:
            if not ray.wait([published[step]], timeout=self.config.pipeline.timeout_s if wait else 0)[0]:
                if not wait:
                    return None
                raise RunError(
                    f"timed out waiting for the weights after step {step} (raise pipeline.timeout_s if it is just slow)"
                )
            found = ray.get(published[step])
            return found.version, received(found)

        return weights


class StreamLearnerActor(LearnerActor):
    """A learner whose checkpoints hold the state of the generator's stream."""

    @during("save")
    def complete_stream_checkpoint(self, begun: None, run: Path, step: int, state: Any, *shares: Rollout) -> None:
        """Add the stream's state when it took over the weights of this step, and the batches that had ended before."""
        self.writer.complete(run, step, [[share] for share in shares], stream=state)

    @during("save")
    def abandon_checkpoint(self, run: Path, step: int) -> None:
        """Remove what was begun: the run ended before the generator took over the weights of this step."""
        self.writer.abandon(run, step)

    def stream_state(self, checkpoint: Path) -> dict[str, Any]:
        """The stream's state in a checkpoint."""
        from overlaprl_ray.runs.saving import load_stream

        return load_stream(checkpoint)
