"""Where a sweep's trials find room: one bundle per actor, how many trials fit at once, how long all of them take.

machine = Machine.present()
bundles = trial_bundles(config, TuneSettings(), machine)      # [{"CPU": 0.6666}, {"CPU": 0.6666}, {"CPU": 0.6666}]
schedule([bundles] * 12, [60.0] * 12, machine, limit=None)    # (most trials at once, seconds in all)
"""

import dataclasses
import heapq
import math
import os
from collections.abc import Sequence
from typing import Literal

import ray
import torch

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.runtime.resources import devices, fit, plan_resources
from overlaprl_ray.runtime.train import ray_running
from overlaprl_ray.tune.spec import TuneSettings

Bundles = list[dict[str, float]]
Node = tuple[float, list[float]]  # free cores, free share of each GPU
Use = tuple[float, list[float]]  # the same, as a trial holds them
START_S = 15.0  # imports, actors and model of a trial on two idle cores, seconds


@dataclasses.dataclass(frozen=True)
class Machine:
    """CPU cores and GPUs of each node."""

    nodes: tuple[tuple[float, float], ...]

    @classmethod
    def present(cls) -> "Machine":
        """The nodes of the Ray that runs, else this machine."""
        if ray.is_initialized():
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            return cls(tuple((node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in alive))
        return cls(((float(os.cpu_count() or 1), float(torch.cuda.device_count())),))

    @classmethod
    def reachable(cls) -> "Machine":
        """The nodes of the cluster that RAY_ADDRESS names, else this machine; starts no Ray."""
        if "RAY_ADDRESS" not in os.environ or ray.is_initialized():
            return cls.present()
        with ray_running():
            return cls.present()

    @property
    def cpus(self) -> float:
        """Of the node with most of them."""
        return max(cpus for cpus, _ in self.nodes)

    @property
    def gpus(self) -> float:
        """Of all nodes."""
        return sum(gpus for _, gpus in self.nodes)


def trial_bundles(config: ExperimentConfig, tune: TuneSettings, machine: Machine) -> Bundles:
    """What a trial reserves: a bundle per actor, or its own process's cores where it runs serially.

    On GPUs their shares decide. Without one, cores do: an actor at a time computes in `sync`, two in the other modes;
    never more than a node has, so that a trial always finds room. Raises `ConfigError` for shares that cannot be had.
    """
    threads = config.resources.threads
    if tune.serial:
        return [{"CPU": min(tune.cpus_per_trial or threads, machine.cpus)}]
    shares = plan_resources(config, machine.gpus).shares
    busy = 1 if config.pipeline.mode == "sync" else 2
    wanted = tune.cpus_per_trial or (0.0 if any(shares) else threads * busy)
    each = math.floor(min(wanted, machine.cpus) / len(shares) * 10_000) / 10_000  # Ray's precision
    return [{"CPU": each or (0.0 if gpu else 0.0001), "GPU": gpu} for gpu in shares]  # Ray refuses an empty bundle


def strategy(bundles: Bundles, machine: Machine) -> Literal["STRICT_PACK", "PACK"]:
    """All on one node if any node is large enough: a trial's actors hand each other whole models."""
    roomy = any(_take(bundles, (cpus, devices(gpus))) for cpus, gpus in machine.nodes)
    return "STRICT_PACK" if roomy else "PACK"


def schedule(
    trials: Sequence[Bundles], seconds: Sequence[float], machine: Machine, limit: int | None
) -> tuple[int, float]:
    """(most trials at once, seconds in all) when each starts as soon as it fits; no trials give (0, 0.0).

    One larger than any node is taken to run alone.
    """
    free: list[Node] = [(cpus, devices(gpus)) for cpus, gpus in machine.nodes]
    waiting = list(range(len(trials)))
    running: list[tuple[float, int, int, Use]] = []  # (end, trial, node, what it holds)
    now, most = 0.0, 0
    while waiting or running:
        for trial in list(waiting):
            if limit is not None and len(running) >= limit:
                break
            found = [(node, used) for node in range(len(free)) if (used := _take(trials[trial], free[node]))]
            if not found and (running or strategy(trials[trial], machine) == "STRICT_PACK"):
                continue
            node, used = found[0] if found else (0, free[0])
            free[node] = _less(free[node], used)
            heapq.heappush(running, (now + seconds[trial], trial, node, used))
            waiting.remove(trial)
        most = max(most, len(running))
        now, _, node, (cpus, shares) = heapq.heappop(running)
        free[node] = _less(free[node], (-cpus, [-share for share in shares]))
    return most, now


def _take(bundles: Bundles, node: Node) -> Use | None:
    """What the bundles take of a node; None if they do not fit."""
    cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    left = fit([bundle.get("GPU", 0.0) for bundle in bundles], node[1])
    if left is None or cpus > node[0] + 1e-6:
        return None
    return cpus, [had - has for had, has in zip(node[1], left, strict=True)]


def _less(node: Node, used: Use) -> Node:
    return node[0] - used[0], [have - gone for have, gone in zip(node[1], used[1], strict=True)]
