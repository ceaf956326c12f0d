"""Starting the actors, waiting for what they return, and finding out which of them died.

actors = Actors(config, task, models, plan, run="demo")
actors.start()    # returns at once: calls can be submitted while the actors load their models
actors.fetch(actors.learner.publish.remote(), "the initial weights")
"""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.folders import Models
from overlaprl_ray.runtime.actors import GeneratorActor, LearnerActor, ReferenceActor
from overlaprl_ray.runtime.resources import Plan
from overlaprl_ray.runtime.streaming import StreamActor, StreamLearnerActor
from overlaprl_ray.tasks import Task

NAME_FREE_S = 30.0  # how long a dead actor's name may stay taken
AVAILABLE_S = 60.0  # how long fetching a result that exists may take


class ActorDied(RunError):
    """A call has no result because an actor's process is gone, or with it the result it had made."""


class Actors:
    """A run's actors by role, named `<run>/<role>` in Ray; no reference actor where beta is 0."""

    def __init__(
        self,
        config: ExperimentConfig,
        task: Task,
        models: Models,
        plan: Plan,
        run: str,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.config, self.plan, self.run, self.say = config, plan, run, say
        self._roles = self._in_order(task, models)
        self._handles: dict[str, Any] = {}
        self._starting: dict[str, Any] = {}  # role -> what answers when it has loaded its model
        self._started = time.monotonic()

    @property
    def generators(self) -> list[Any]:
        """The generators in the order of their shares."""
        return [self._handles[role] for role in self._roles if role.startswith("generator")]

    @property
    def reference(self) -> Any | None:
        """The reference, where there is one."""
        return self._handles.get("reference")

    @property
    def learner(self) -> Any:
        """The learner."""
        return self._handles["learner"]

    def start(self) -> None:
        """Start them all; `wait_ready` and the first `fetch` wait until each has loaded its model."""
        for role in self._roles:
            self._handles[role] = self._launch(role)
            self._starting[role] = self._handles[role].__ray_ready__.remote()
        self._environment_call = self.learner.environment.remote()

    def wait_ready(self) -> None:
        """Wait for those that are starting, within `resources.start_timeout_s`. Raises `RunError`: that ends a run."""
        if not self._starting:
            return
        try:
            self._await(self._starting, self._started)
        except ActorDied as error:  # nothing to recover yet: the next one would die of the same
            raise RunError(str(error)) from error
        self._starting = {}
        self.say(f"actors ready after {time.monotonic() - self._started:.0f} s")

    def _await(self, replies: Mapping[str, Any], started: float) -> None:
        """Wait for each role's answer that it has loaded its model."""
        deadline = started + self.config.resources.start_timeout_s
        for role, reply in replies.items():
            what, left = f"{self.run}/{role} to load its model", deadline - time.monotonic()
            fetch(reply, what, left, "resources.start_timeout_s")

    def environment(self) -> dict[str, Any]:
        """Versions and hardware, as the learner sees them."""
        return self.fetch(self._environment_call, "the learner's environment")

    def _in_order(self, task: Task, models: Models) -> dict[str, list[Any]]:
        """Each role's class and its arguments of its own, in the order of `Plan.shares`."""
        count, stored = self.plan.num_generators, ray.put(task)
        names = ["generator"] if count == 1 else [f"generator-{i}" for i in range(count)]
        stream = self.config.pipeline.generation == "stream"
        generator, learner = (StreamActor, StreamLearnerActor) if stream else (GeneratorActor, LearnerActor)
        roles: dict[str, list[Any]] = {
            name: [generator, models.policy, stored, (i, count)] for i, name in enumerate(names)
        }
        if self.plan.needs_reference:
            roles["reference"] = [ReferenceActor, models.reference]
        return {**roles, "learner": [learner, models.policy]}

    @property
    def roles(self) -> list[str]:
        """Every role, in the order of starting."""
        return list(self._roles)

    def restart(self, roles: Sequence[str]) -> None:
        """New processes for these roles, once all old ones are gone. Raises `RunError` where one does not get ready."""
        for role in roles:
            ray.kill(self._handles.pop(role))  # dead or dying: its name is free only without it
        gc.collect()  # and without any handle of it
        deadline = time.monotonic() + NAME_FREE_S
        for role in roles:
            while role not in self._handles:
                try:
                    self._handles[role] = self._launch(role)
                except RunError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)
        self._await({role: self._handles[role].__ray_ready__.remote() for role in roles}, time.monotonic())

    def dead(self) -> list[str]:
        """The roles whose process is gone; to be asked when all calls under way have ended one way or the other."""
        dead = []
        replies = {role: handle.__ray_ready__.remote() for role, handle in self._handles.items()}
        for role, reply in replies.items():
            try:
                self.fetch(reply, f"{self.run}/{role} to say that it is alive")
            except ActorDied:
                dead.append(role)
        return dead

    def stop(self) -> None:
        """End every actor's process."""
        for handle in self._handles.values():
            ray.kill(handle)

    def fetch(self, reference: Any, what: str) -> Any:
        """The result behind a reference, within `pipeline.timeout_s`. Raises `RunError`, `ActorDied`."""
        self.wait_ready()
        return fetch(reference, what, self.config.pipeline.timeout_s, "pipeline.timeout_s")

    def _launch(self, role: str) -> Any:
        (kind, *arguments), place = self._roles[role], list(self._roles).index(role)
        options = {
            "name": f"{self.run}/{role}",
            "num_gpus": self.plan.shares[place],
            "num_cpus": 0,  # three actors must fit two cores; threads are what bounds their use
            "runtime_env": {"env_vars": self._environment()},
            **own_bundle(place, self.plan.shares),
        }
        try:
            actor = ray.remote(kind).options(**options)
            return actor.remote(self.config, self.plan.shares[place], *arguments)
        except ValueError as error:  # what Ray raises where the name is taken
            raise RunError(f"actor {self.run}/{role} cannot be started ({error}); give another output.dir") from error

    def _environment(self) -> dict[str, str]:
        variables = {name: str(self.plan.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if self.config.lag:  # actors run at the same time: threads that wait must leave the cores to the others
            variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        if "HF_HUB_OFFLINE" in os.environ:  # the driver may have set it after this Ray was started
            variables["HF_HUB_OFFLINE"] = os.environ["HF_HUB_OFFLINE"]
        # what the driver can import (a user's reward functions), actors can
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return {**variables, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}


def own_bundle(place: int, shares: Sequence[float]) -> dict[str, Any]:
    """Placement of an actor in its own bundle, where a sweep's trial has reserved one for each.

    Left to itself Ray puts a small actor into a large one's bundle, and the large one waits forever.
    """
    group = ray.util.get_current_placement_group()
    if group is None or len(group.bundle_specs) != len(shares):
        return {}  # no group, or somebody else's: Ray finds a place
    if any(bundle.get("GPU", 0.0) < share for bundle, share in zip(group.bundle_specs, shares, strict=True)):
        return {}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)}


def fetch(reference: Any, what: str, timeout_s: float, setting: str) -> Any:
    """`ray.get` with a limit; every way it can fail becomes one line that names what was waited for."""
    try:
        return ray.get(reference, timeout=max(0.0, timeout_s))
    except ray.exceptions.GetTimeoutError:
        raise timeout_error(what, setting) from None
    except ray.exceptions.RayError as error:
        raise _run_error(error, what) from error


def is_available(reference: Any | None) -> bool:
    """Whether a call was made, and left a result when it ended."""
    if reference is None:
        return False
    try:
        ray.get(reference, timeout=AVAILABLE_S)
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"timed out after {AVAILABLE_S:g} s fetching a result that exists; is its node gone?") from None
    except ray.exceptions.RayError:
        return False
    return True


def timeout_error(what: str, setting: str) -> RunError:
    """What a wait that took too long ends with; `setting` is its limit."""
    return RunError(f"timed out waiting for {what} (raise {setting} if it is merely slow)")


def _run_error(error: Any, what: str) -> Exception:
    """Our own errors as they were raised in the actor; an actor's death; any other with its type."""
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.ObjectLostError):
        return ActorDied(f"an actor died while waiting for {what}: {_reason(error)}")
    if isinstance(error, RunError | ConfigError):
        return RunError(str(error))
    return RunError(f"failed while waiting for {what}: {type(error).__name__}: {str(error).strip()}")


def _reason(error: Exception) -> str:
    """Ray reports an actor's end in many coloured lines: the first says that, the last says why."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    reason = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"
    return reason.partition(" Some common causes")[0]  # a paragraph of advice
