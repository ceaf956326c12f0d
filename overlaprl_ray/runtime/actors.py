"""The three Ray actors: thin shells that give sampler, reference and learner a process, a device and their threads.

Everything they return is a task's return value, so the driver owns it and it outlives the actor. supervisor.py starts
them. What computes is imported in the actors' processes: the driver needs the classes, but neither torch nor
transformers.

    rollout = generator.generate.remote(1, 0, learner.publish.remote())
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Rollout, Scores, Span, batch_of
from overlaprl_ray.runs.environment import environment
from overlaprl_ray.runs.imports import import_without
from overlaprl_ray.runs.ray_metrics import Watched, during
from overlaprl_ray.runtime.resources import tensor_bytes
from overlaprl_ray.tasks import Task
from overlaprl_ray.workers.results import Evaluation, StepResult

if TYPE_CHECKING:
    import torch

    from overlaprl_ray.runtime.weights import Published


def _take_device(threads: int, gpu: float) -> tuple[str, int]:
    """Set this process's threads, and its cap on GPU memory: Ray's fractions only place actors.

    Returns the device, and how many bytes its tensors may take there (0: a CPU).
    """
    import_without("transformers.modeling_utils", "scipy", "sklearn")  # for image models' losses, assisted generation
    import torch

    torch.set_num_threads(threads)
    if not gpu:
        return "cpu", 0
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        allowed = tensor_bytes(gpu, total)
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        return "cuda", allowed
    check_simulated(ray.get_runtime_context().get_node_labels())
    return "cpu", 0


def check_simulated(labels: Mapping[str, Any]) -> None:
    """Refuse the CPU in place of a real GPU, whose type is among its node's labels; a simulated one has none there."""
    if kind := labels.get("ray.io/accelerator-type"):
        import torch

        raise RunError(
            f"this actor has a share of a GPU ({kind}) that torch {torch.__version__} cannot use (no CUDA); install a "
            "torch built for its driver, or set resources.generator_gpu, reference_gpu and learner_gpu to 0"
        )


class GeneratorActor(Watched):
    """Samples batches and evaluates, with the weights it is handed."""

    def __init__(self, config: ExperimentConfig, gpu: float, policy: str, task: Task, share: tuple[int, int]):
        super().__init__(config)
        device, allowed = _take_device(config.resources.threads, gpu)
        from overlaprl_ray.workers.build import build_sampler

        self.sampler = build_sampler(config, task, policy, device, allowed, share)
        self.loaded_step = -1

    @during("generate")
    def generate(self, batch: int, weights_step: int, published: Published) -> Rollout:
        """This generator's share of a batch, with the weights after `weights_step`."""
        return self.sampler.rollout(batch, weights_step, self._load(weights_step, published))

    @during("evaluate")
    def evaluate(self, step: int, published: Published) -> Evaluation:
        """Held-out accuracy of the policy after a step."""
        self._load(step, published)
        started = time.time()
        accuracy, n = self.sampler.evaluate(step)
        return Evaluation(step, published.version, accuracy, n, (started, time.time()))

    def _load(self, step: int, published: Published) -> Span:
        from overlaprl_ray.runtime.weights import received

        started = time.time()
        if step != self.loaded_step:
            self.sampler.engine.load_weights(published.version, received(published))
            self.loaded_step = step
        return started, time.time()


class ReferenceActor(Watched):
    """Scores rollouts under the frozen reference model."""

    def __init__(self, config: ExperimentConfig, gpu: float, model: str):
        super().__init__(config)
        device, _ = _take_device(config.resources.threads, gpu)
        from overlaprl_ray.workers.build import build_reference

        self.reference = build_reference(config, model, device)

    @during("score")
    def score(self, after: StepResult | None, *shares: Rollout) -> Scores:
        """Reference logprobs of a batch; `after` only makes the call wait until that step is done."""
        return self.reference.score(batch_of(shares, self.reference.config.grpo.num_prompts_per_step))


class LearnerActor(Watched):
    """Judges rollouts, trains on them, publishes weights, writes checkpoints."""

    def __init__(self, config: ExperimentConfig, gpu: float, policy: str):
        super().__init__(config)
        self.config = config
        device, _ = _take_device(config.resources.threads, gpu)
        from overlaprl_ray.models.loading import export_eos, load_tokenizer
        from overlaprl_ray.runs.saving import CheckpointWriter
        from overlaprl_ray.workers.build import build_learner, build_reference

        self.learner = build_learner(config, policy, device)
        self.buffers: dict[torch.dtype, torch.Tensor] = {}  # for weights on their way from a GPU
        self.reference = build_reference(config, policy, learner=self.learner) if config.learner_scores else None
        self.tokenizer = load_tokenizer(policy)
        export_eos(self.learner.model, self.tokenizer)
        self.writer = CheckpointWriter(config, self.tokenizer)
        self.finished = 0  # steps

    def device(self) -> str:
        """What it computes on: "cpu" or "cuda"."""
        return self.learner.model.device.type

    def environment(self) -> dict[str, Any]:
        """Versions and hardware, for environment.json."""
        return environment()

    @during("publish")
    def publish(self) -> Published:
        """The weights as they are now."""
        from overlaprl_ray.runtime.weights import publish, to_host

        weights = self.learner.weights()
        return publish(self.learner.version, weights if self.device() == "cpu" else to_host(weights, self.buffers))

    def train(self, scores: Scores | None, *shares: Rollout) -> Iterator[Published | StepResult]:
        """One training step: the weights after it and its numbers, as two objects. Every batch once, in order.

        Ray stores the weights before it asks for the numbers, which therefore say how long that took.
        """
        result = self._train(batch_of(shares, self.config.grpo.num_prompts_per_step), scores)
        started, before = time.time(), self.enter("publish")
        yield self.publish()
        result.spans["publish"] = (started, time.time())
        self.enter(before)
        yield result

    @during("train")
    def _train(self, rollout: Rollout, scores: Scores | None) -> StepResult:
        if rollout.batch != self.finished + 1:
            raise RunError(f"batch {rollout.batch} came to the learner after step {self.finished}")
        result = self.learner.step(rollout, self._score(rollout) if self.reference else scores)
        self.finished = rollout.batch
        return result

    @during("score")
    def _score(self, rollout: Rollout) -> Scores:
        assert self.reference is not None
        return self.reference.score(rollout)

    @during("save")
    def begin_checkpoint(self, run: Path, step: int) -> None:
        """Copy the state after the step just done; it is written beside the steps that follow."""
        if self.finished == step:  # else that step failed, and will be submitted again with its checkpoint
            self.writer.begin(run, step, self.learner)

    @during("save")
    def complete_checkpoint(self, begun: None, run: Path, step: int, sources: list[int], *objects: Any) -> None:
        """Add the weights after the steps `sources`, then the rollouts of the batches after it, share by share.

        `begun` is what `begin_checkpoint` returned: as an argument, so that its error becomes this call's.
        """
        from overlaprl_ray.runtime.weights import received

        count, older, shares = self.config.resources.num_generators, objects[: len(sources)], objects[len(sources) :]
        weights = {source: (old.version, received(old)) for source, old in zip(sources, older, strict=True)}
        self.writer.complete(run, step, [shares[i : i + count] for i in range(0, len(shares), count)], weights)

    def restore(self, checkpoint: Path, step: int) -> list[Published | Rollout] | Published:
        """Resume from a checkpoint: the weights after it, older ones it holds, then its rollouts, share by share."""
        from overlaprl_ray.runs.saving import load_rollouts, load_trainer, load_weights
        from overlaprl_ray.runtime.weights import publish

        self.learner.load(load_trainer(checkpoint))
        self.finished = step
        older = [publish(*weights) for weights in load_weights(checkpoint).values()]
        shares = [share for batch in load_rollouts(checkpoint) for share in batch]
        return [self.publish(), *older, *shares] if older or shares else self.publish()

    @during("save")
    def save(self, folder: Path) -> None:
        """Policy (float32 masters where there are some) and tokenizer as a Hugging Face folder, whole or not there.

        Under LoRA it holds the adapter, and merged/ the whole model where `output.merge_lora`.
        """
        scratch = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            self.learner.saver()(scratch)
            self.tokenizer.save_pretrained(scratch)
            if self.config.output.merge_lora:
                self.learner.master_copy().save_pretrained(scratch / "merged")
                self.tokenizer.save_pretrained(scratch / "merged")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch, folder)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise RunError(
                f"'{folder}' cannot be written ({error.strerror or error}); free some space, or fix the permissions"
            ) from error
