"""What a trial reserves, one bundle per actor, and on which nodes.

nodes = present_nodes()                             # [(2.0, 0.0)]
trial_bundles(config, TuneSettings(), nodes)        # [{"CPU": 0.6666}, {"CPU": 0.6666}, {"CPU": 0.6666}]
"""

import math
import os
from typing import Literal

import ray

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.runtime.preflight import available_gpus
from overlaprl_ray.runtime.resources import devices, fit, plan_resources
from overlaprl_ray.tune.spec import TuneSettings

Bundles = list[dict[str, float]]
Nodes = list[tuple[float, float]]  # CPU cores and GPUs of each


def present_nodes() -> Nodes:
    """The nodes of the running Ray, else this machine."""
    if ray.is_initialized():
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in alive]
    return [(float(os.cpu_count() or 1), available_gpus())]


def trial_bundles(config: ExperimentConfig, tune: TuneSettings, nodes: Nodes) -> Bundles:
    """What a trial reserves: a bundle per actor, or its own process's cores where it runs serially.

    On GPUs their shares decide. Without one, cores do: one actor at a time computes in `sync`, two in the other modes;
    never more than a node has, so that a trial always fits. Raises `ConfigError` for shares that the nodes lack.
    """
    threads = config.resources.threads
    most = max(cpus for cpus, _ in nodes)
    if tune.serial:
        return [{"CPU": min(tune.cpus_per_trial or threads, most)}]
    shares = plan_resources(config, sum(gpus for _, gpus in nodes)).shares
    busy = 1 if config.pipeline.mode == "sync" else 2
    wanted = tune.cpus_per_trial or (0.0 if any(shares) else threads * busy)
    each = math.floor(min(wanted, most) / len(shares) * 10_000) / 10_000  # Ray's precision
    return [{"CPU": each or (0.0 if gpu else 0.0001), "GPU": gpu} for gpu in shares]  # Ray refuses an empty bundle


def strategy(bundles: Bundles, nodes: Nodes) -> Literal["STRICT_PACK", "PACK"]:
    """All on one node if any node is large enough: a trial's actors exchange whole models."""
    needed = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    shares = [bundle.get("GPU", 0.0) for bundle in bundles]
    fits = any(needed <= cpus + 1e-6 and fit(shares, devices(gpus)) is not None for cpus, gpus in nodes)
    return "STRICT_PACK" if fits else "PACK"


def shown(bundles: Bundles) -> str:
    """Bundles as a person reads them: [0.5 CPU], [0.5 CPU]."""
    amounts = [" + ".join(f"{amount:g} {kind}" for kind, amount in bundle.items() if amount) for bundle in bundles]
    return f"[{'], ['.join(amounts)}]"
