"""Starting the actors, waiting for them, and finding out which of them died.

actors = Actors(config, task, plan, run="demo")
actors.start()
fetch(actors.learner.publish.remote(), "the initial weights", 60.0, "pipeline.timeout_s")
"""

import gc
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runtime.actors import GeneratorActor, LearnerActor, ReferenceActor
from overlaprl_ray.runtime.resources import Plan
from overlaprl_ray.tasks import Task

NAME_FREE_S = 30.0  # how long a dead actor's name may stay taken


class ActorDied(RunError):
    """A call could not be answered since an actor's process is gone, or the result it had made."""


class Actors:
    """A run's actors by role, named `<run>/<role>` in Ray; no reference actor where beta is 0."""

    def __init__(self, config: ExperimentConfig, task: Task, plan: Plan, run: str):
        self.config, self.plan, self.run = config, plan, run
        self._task = ray.put(task)
        self._handles: dict[str, Any] = {}

    @property
    def generators(self) -> list[Any]:
        """The generators in the order of their shares."""
        return [handle for role, handle in self._handles.items() if role.startswith("generator")]

    @property
    def reference(self) -> Any | None:
        """The reference, where there is one."""
        return self._handles.get("reference")

    @property
    def learner(self) -> Any:
        """The learner."""
        return self._handles["learner"]

    def start(self) -> None:
        """Start them all and wait until each has loaded its model. Raises `RunError`; then none is left."""
        try:
            for role in self._roles():
                self._handles[role] = self._launch(role)
            self._wait_ready(list(self._handles))
        except BaseException:
            self.stop()
            raise

    def _roles(self) -> list[str]:
        """In the order of `Plan.shares`."""
        count = self.plan.num_generators
        generators = ["generator"] if count == 1 else [f"generator-{i}" for i in range(count)]
        return [*generators, *(["reference"] if self.plan.needs_reference else []), "learner"]

    def restart(self, role: str) -> None:
        """A new process for a dead one's role. Raises `RunError` where it does not get ready."""
        if self._handles[role] is not None:
            ray.kill(self._handles[role])  # dead already, or half: its name is free only without it
        self._handles[role] = None
        gc.collect()  # and without any handle of it
        deadline = time.monotonic() + NAME_FREE_S
        while True:
            try:
                self._handles[role] = self._launch(role)
                break
            except RunError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        self._wait_ready([role])

    def dead(self) -> list[str]:
        """The roles whose process is gone; asked when all work in flight has ended one way or the other."""
        limit, found = self.config.pipeline.timeout_s, [r for r, handle in self._handles.items() if handle is None]
        replies = {role: handle.ready.remote() for role, handle in self._handles.items() if handle is not None}
        for role, reply in replies.items():
            try:
                fetch(reply, f"{self.run}/{role} to say that it lives", limit, "pipeline.timeout_s")
            except ActorDied:
                found.append(role)
        return found

    def stop(self) -> None:
        """End every actor's process."""
        for handle in self._handles.values():
            if handle is not None:
                ray.kill(handle)

    def _launch(self, role: str) -> Any:
        threads = {name: str(self.plan.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if self.config.lag:  # actors run at the same time: threads that wait must leave the cores to the others
            threads["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        # what the driver can import (a user's reward functions), actors can
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # a Ray that runs already knows nothing of what the driver has found out about the hub (checks/hub.py)
        hub = {name: os.environ[name] for name in ("HF_HUB_OFFLINE",) if name in os.environ}
        variables = {**threads, **hub, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
        environment = {"env_vars": variables}
        kind: type
        more: tuple[Any, ...] = ()
        if role == "learner":
            kind, gpu = LearnerActor, self.plan.learner_gpu
        elif role == "reference":
            kind, gpu = ReferenceActor, self.plan.reference_gpu
        else:
            index = int(role.partition("-")[2] or 0)
            kind, gpu = GeneratorActor, self.plan.generator_gpu
            more = ((index, self.plan.num_generators),)
        # no CPUs are asked for: three actors must fit two cores; threads are what bounds their use
        options = {"name": f"{self.run}/{role}", "num_gpus": gpu, "num_cpus": 0, "runtime_env": environment}
        options |= own_bundle(self._roles().index(role), self.plan.shares)
        try:
            return ray.remote(kind).options(**options).remote(self.config, self._task, gpu, *more)
        except ValueError as error:  # Ray's word for a name that is taken
            raise RunError(f"actor {self.run}/{role} cannot be started ({error}); give another output.dir") from error

    def _wait_ready(self, roles: list[str]) -> None:
        replies = {role: self._handles[role].ready.remote() for role in roles}
        deadline = time.monotonic() + self.config.resources.start_timeout_s
        for role, reply in replies.items():
            left = deadline - time.monotonic()
            fetch(reply, f"{self.run}/{role} to load its model", left, "resources.start_timeout_s")


def own_bundle(place: int, shares: Sequence[float]) -> dict[str, Any]:
    """Placement of an actor in its own bundle, where a sweep's trial has reserved one for each.

    Left to itself Ray puts a small actor into a large one's bundle, and the large one waits forever.
    """
    group = ray.util.get_current_placement_group()
    if group is None or len(group.bundle_specs) != len(shares):
        return {}  # no group, or one of somebody else's making: Ray finds a place
    if any(bundle.get("GPU", 0.0) < share for bundle, share in zip(group.bundle_specs, shares, strict=True)):
        return {}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)}


def fetch(reference: Any, what: str, timeout_s: float, setting: str) -> Any:
    """`ray.get` with a limit; every way it can fail becomes one line that names what was waited for."""
    try:
        return ray.get(reference, timeout=max(0.0, timeout_s))
    except ray.exceptions.GetTimeoutError:
        raise in_vain(what, setting) from None
    except ray.exceptions.RayTaskError as error:
        raise _known(error, what) from error
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise _death(error, what) from error


def in_vain(what: str, setting: str) -> RunError:
    """The end of a wait that found nothing."""
    return RunError(f"waited in vain for {what} ({setting} ran out); does an actor hang? else raise it")


def _known(error: Any, what: str) -> Exception:
    """Our own errors as they were raised in the actor; any other with its type, and the traceback as its cause."""
    cause = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, ray.exceptions.RayActorError | ray.exceptions.ObjectLostError):
        return _death(cause, what)
    if isinstance(cause, RunError | ConfigError):
        return RunError(str(cause))
    return RunError(f"failed while waiting for {what}: {type(cause).__name__}: {str(cause).strip()}")


def _death(error: Exception, what: str) -> ActorDied:
    """Ray tells of an actor's end in many coloured lines: the first says that, the last says why."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    reason = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"
    reason = reason.partition(" Some common causes")[0]  # a paragraph of advice
    return ActorDied(f"an actor died while waiting for {what}: {reason}")
