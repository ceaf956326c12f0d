"""The three Ray actors: thin shells that give sampler, reference and learner a process, a device and their threads.

Everything they return is a task's return value, so the driver owns it and it outlives the actor.

    actors = start_actors(config, task, plan, run="demo")
    rollout = actors.generators[0].generate.remote(1, 0, actors.learner.publish.remote())
"""

import dataclasses
import os
import re
import sys
import time
from typing import Any

import ray
import torch

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.learner import Learner
from overlaprl_ray.metrics import StepResult
from overlaprl_ray.models import load_tokenizer
from overlaprl_ray.parts import build_learner, build_reference, build_sampler
from overlaprl_ray.resources import Plan
from overlaprl_ray.rollout import Rollout, Scores, Span, merge
from overlaprl_ray.tasks import Task
from overlaprl_ray.weights import Published, publish, received


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Greedy held-out accuracy of the policy after a step."""

    step: int
    version: int
    accuracy: float
    n: int
    span: Span


def _take_device(threads: int, gpu: float) -> str:
    """Set this process's threads, and its cap on GPU memory: Ray's fractions only place actors."""
    torch.set_num_threads(threads)
    if gpu and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu))
        return "cuda"
    return "cpu"


class GeneratorActor:
    """Samples batches and evaluates, with the weights it is handed."""

    def __init__(self, config: ExperimentConfig, task: Task, gpu: float, share: tuple[int, int]):
        self.sampler = build_sampler(config, task, _take_device(config.resources.threads, gpu), share)
        self.loaded_step = -1

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def generate(self, batch: int, weights_step: int, published: Published) -> Rollout:
        """This generator's share of a batch, with the weights after `weights_step`."""
        return self.sampler.rollout(batch, weights_step, self._load(weights_step, published))

    def evaluate(self, step: int, published: Published) -> Evaluation:
        """Held-out accuracy of the policy after a step."""
        self._load(step, published)
        started = time.time()
        accuracy, n = self.sampler.evaluate()
        return Evaluation(step, published.version, accuracy, n, (started, time.time()))

    def _load(self, step: int, published: Published) -> Span:
        started = time.time()
        if step != self.loaded_step:
            self.sampler.engine.load_weights(published.version, received(published))
            self.loaded_step = step
        return started, time.time()


class ReferenceActor:
    """Scores rollouts under the frozen reference model."""

    def __init__(self, config: ExperimentConfig, task: Task, gpu: float):
        self.reference = build_reference(config, task, _take_device(config.resources.threads, gpu))

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def score(self, after: StepResult | None, *shares: Rollout) -> Scores:
        """Reference logprobs of a batch; `after` only makes the call wait until that step is done."""
        return self.reference.score(merge(shares))


class LearnerActor:
    """Judges rollouts, trains on them, publishes weights."""

    def __init__(self, config: ExperimentConfig, task: Task, gpu: float):
        self.config = config
        self.learner: Learner = build_learner(config, task, _take_device(config.resources.threads, gpu))

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def publish(self) -> Published:
        """The weights as they are now."""
        return publish(self.learner.version, self.learner.weights())

    def step(self, scores: Scores | None, *shares: Rollout) -> tuple[StepResult, Published]:
        """One training step; its numbers and the weights after it, as two objects."""
        result = self.learner.step(merge(shares), scores)
        return result, self.publish()

    def save(self, folder: str) -> None:
        """Policy (float32 masters where there are some) and tokenizer as a Hugging Face folder."""
        self.learner.master_model().save_pretrained(folder)
        load_tokenizer(self.config.grpo.model_name).save_pretrained(folder)


@dataclasses.dataclass(frozen=True)
class Actors:
    """Handles of a run's actors; no reference actor where beta is 0."""

    generators: list[Any]
    reference: Any | None
    learner: Any

    def stop(self) -> None:
        """End every actor's process."""
        for actor in (*self.generators, self.reference, self.learner):
            if actor is not None:
                ray.kill(actor)


def start_actors(config: ExperimentConfig, task: Task, plan: Plan, run: str) -> Actors:
    """Start the actors, named `<run>/<role>`, and wait until each has loaded its model."""
    threads = {name: str(plan.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # what the driver can import (a user's reward functions), actors can
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {"env_vars": {**threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}}
    task_ref = ray.put(task)

    def start(kind: type, role: str, gpu: float, *arguments: Any) -> Any:
        # no CPUs are asked for: three actors must fit two cores; threads are what bounds their use
        options = {"name": f"{run}/{role}", "num_gpus": gpu, "num_cpus": 0, "runtime_env": environment}
        try:
            return ray.remote(kind).options(**options).remote(config, task_ref, gpu, *arguments)
        except ValueError as error:  # Ray's word for a name that is taken
            raise RunError(f"actor {run}/{role} cannot be started ({error}); give another output.dir") from error

    count = plan.num_generators
    names = ["generator"] if count == 1 else [f"generator-{i}" for i in range(count)]
    started: dict[str, Any] = {}
    try:
        for index, name in enumerate(names):
            started[name] = start(GeneratorActor, name, plan.generator_gpu, (index, count))
        if plan.needs_reference:
            started["reference"] = start(ReferenceActor, "reference", plan.reference_gpu)
        started["learner"] = start(LearnerActor, "learner", plan.learner_gpu)
        ready = {name: actor.ready.remote() for name, actor in started.items()}
        deadline = time.monotonic() + config.resources.start_timeout_s
        for name, reply in ready.items():
            fetch(reply, f"{run}/{name} to load its model", deadline - time.monotonic(), "resources.start_timeout_s")
    except BaseException:
        for actor in started.values():
            ray.kill(actor)
        raise
    return Actors([started[name] for name in names], started.get("reference"), started["learner"])


def fetch(reference: Any, what: str, timeout_s: float, setting: str) -> Any:
    """`ray.get` with a limit; every way it can fail becomes one line that names what was waited for."""
    try:
        return ray.get(reference, timeout=max(0.0, timeout_s))
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"waited in vain for {what} ({setting} ran out); does an actor hang? else raise it") from None
    except ray.exceptions.RayTaskError as error:
        raise _known(error, what) from error
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise _death(error, what) from error


def _known(error: Any, what: str) -> Exception:
    """Our own errors as they were raised in the actor; any other with its type, and the traceback as its cause."""
    cause = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return _death(cause, what)
    if isinstance(cause, RunError | ConfigError):
        return RunError(str(cause))
    return RunError(f"failed while waiting for {what}: {type(cause).__name__}: {str(cause).strip()}")


def _death(error: Exception, what: str) -> RunError:
    """Ray tells of an actor's end in many coloured lines: the first says that, the last says why."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    reason = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"
    return RunError(f"an actor died while waiting for {what}: {reason}")
