"""Who gets which share of the machine: threads, and fractions of one GPU; and which engine generates on it.

Fractions only place actors; each actor also caps its own memory at its share (see actors.py). A share is all that a
process takes of the device: its tensors, and the CUDA context that every process has beside them.

    plan_resources(config, gpus=1.0, device=24e9).lines()
"""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence

import psutil

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.errors import ConfigError

# Of one GPU: the learner holds optimizer states, the reference weights alone, and the driver needs what is left.
GENERATORS_GPU, REFERENCE_GPU, LEARNER_GPU = 0.35, 0.15, 0.45
CONTEXT = 500_000_000  # bytes of a CUDA context with its kernels loaded


@dataclasses.dataclass(frozen=True)
class Plan:
    """GPU share of each actor (0 = CPU only) and threads."""

    generator_gpu: float
    reference_gpu: float
    learner_gpu: float
    num_generators: int
    threads: int
    needs_reference: bool
    learner_scores: bool = False
    device: float | None = None  # memory of the GPU, bytes, where it is known

    @property
    def shares(self) -> list[float]:
        """GPU share of each actor, in the order of starting: generators, reference if there is one, learner."""
        reference = [self.reference_gpu] if self.needs_reference else []
        return [*[self.generator_gpu] * self.num_generators, *reference, self.learner_gpu]

    @property
    def cores(self) -> int | None:
        """How many actors can compute at once on the CPU; None on a GPU, which they share without counting cores."""
        if self.generator_gpu or self.learner_gpu:
            return None
        return max(1, (os.cpu_count() or 1) // self.threads)

    def lines(self) -> list[str]:
        """The plan as a person reads it."""

        def share(gpu: float) -> str:
            if not gpu:
                return f"CPU, {self.threads} thread(s)"
            room = f" ({tensor_bytes(gpu, self.device) / 1e9:.1f} GB and a CUDA context)" if self.device else ""
            return f"{gpu:.2f} GPU{room}, {self.threads} CPU thread(s)"

        generators = f"{self.num_generators} generators, each" if self.num_generators > 1 else "generator"
        absent = "the learner, its adapter off" if self.learner_scores else "none (grpo.beta is 0)"
        reference = share(self.reference_gpu) if self.needs_reference else absent
        return [
            f"{generators}: {share(self.generator_gpu)}",
            f"reference: {reference}",
            f"learner: {share(self.learner_gpu)}",
        ]


def plan_resources(config: ExperimentConfig, gpus: float, device: float | None = None) -> Plan:
    """Shares for a machine (or cluster) with `gpus` GPUs. Raises `ConfigError` where they cannot be had.

    `device` is one GPU's memory in bytes, where it is known.
    """
    resources = config.resources
    needs_reference = config.needs_reference

    def share(value: float | None, automatic: float) -> float:
        return _ray_share(value if value is not None else (automatic if gpus else 0.0))

    plan = Plan(
        generator_gpu=share(resources.generator_gpu, GENERATORS_GPU / resources.num_generators),
        reference_gpu=share(resources.reference_gpu, REFERENCE_GPU) if needs_reference else 0.0,
        learner_gpu=share(resources.learner_gpu, LEARNER_GPU),
        num_generators=resources.num_generators,
        threads=resources.threads,
        needs_reference=needs_reference,
        learner_scores=config.learner_scores,
        device=device if gpus else None,
    )
    if fit(plan.shares, devices(gpus)) is None:
        wanted = (
            f"resources.generator_gpu = {plan.generator_gpu:g} ({plan.num_generators} of them), reference_gpu = "
            f"{plan.reference_gpu:g}, learner_gpu = {plan.learner_gpu:g}"
        )
        remedy = "lower the shares until each finds room on one GPU" if gpus else "set them to 0 or null"
        raise ConfigError(f"{wanted}: {sum(plan.shares):g} GPU in all, but there are {gpus:g}; {remedy}")
    if gpus and config.model.engine == "vllm" and not plan.generator_gpu:  # it would take the GPU without a cap
        raise ConfigError(
            f"resources.generator_gpu = {plan.generator_gpu:g} with model.engine = 'vllm': vLLM would take the GPU all "
            "the same; set it to null or a share above 0, hide the GPU (CUDA_VISIBLE_DEVICES=''), or use engine hf"
        )
    return plan


def check_memory(plan: Plan, config: ExperimentConfig, weights: int) -> None:
    """Refuse a share that cannot even hold its model; `weights` are the policy's bytes. Raises `ConfigError`."""
    # The learner's beside them: in float32 gradient and two moments; in bfloat16 its gradient, and in float32 master,
    # sum of gradients and two moments. Another reference model's size is its own.
    learner = weights * (4 if config.model.dtype == "float32" else 10)
    needs = {"generator": weights, "reference": 0 if config.model.reference else weights, "learner": learner}
    for role, needed in needs.items() if plan.device else ():
        share, device = getattr(plan, f"{role}_gpu"), plan.device or 0.0
        if share and needed > tensor_bytes(share, device):
            raise ConfigError(
                f"resources.{role}_gpu = {share:g}: of {device / 1e9:.3g} GB that leaves "
                f"{tensor_bytes(share, device) / 1e9:.3g} beside a CUDA context, but the model takes "
                f"{needed / 1e9:.3g} there, {(needed + CONTEXT) / device:.2f} of the GPU; raise it above that, or use "
                "model.lora_r or a smaller model"
            )


def tensor_bytes(share: float, device: float) -> int:
    """What a share of a GPU with so many bytes leaves for tensors, once the process has its CUDA context."""
    return max(0, int(share * device) - CONTEXT)


def under_mps() -> bool:
    """Whether processes on this machine's GPU share one context through CUDA MPS."""
    names = (process.info["name"] or "" for process in psutil.process_iter(["name"]))
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ or any(name.startswith("nvidia-cuda-mps") for name in names)


def resolve_engine(config: ExperimentConfig, gpus: float) -> tuple[ExperimentConfig, str]:
    """The configuration with `model.engine: auto` decided, and a line that says which engine it is and why."""
    engine = config.model.engine
    if engine != "auto":
        return config, f"engine: {engine} (as model.engine says)"
    reasons = {
        "there is no GPU": not gpus,
        "the generator has no share of the GPU": config.resources.generator_gpu == 0,
        "vLLM gets no adapters": config.model.lora_r > 0,
        "vLLM keeps its rows to itself": config.pipeline.generation == "stream",
        "the built-in model is small": config.grpo.model_name == TINY,
        "vLLM is not installed": importlib.util.find_spec("vllm") is None,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    config = config.model_copy(update={"model": config.model.model_copy(update={"engine": "hf" if why else "vllm"})})
    return config, f"engine: hf ({why})" if why else "engine: vllm (there is a GPU, and vLLM is installed)"


def _ray_share(share: float) -> float:
    """Rounded down to the four decimals Ray allows, but never to nothing."""
    return max(math.floor(share * 10_000 + 1e-6) / 10_000, 0.0001) if share else 0.0


def devices(gpus: float) -> list[float]:
    """Each GPU's free share on a machine that counts `gpus` of them."""
    return [1.0] * int(gpus) + ([gpus % 1] if gpus % 1 else [])


def fit(shares: Sequence[float], free: Sequence[float]) -> list[float] | None:
    """What is left of each GPU once every share has found room on a single one; None if one finds none.

    Each is placed where it fits tightest, in the order of starting.
    """
    left = list(free)
    for share in shares:
        room = [i for i, has in enumerate(left) if has >= share - 1e-9]
        if share and not room:
            return None
        if share:
            left[min(room, key=left.__getitem__)] -= share
    return left
