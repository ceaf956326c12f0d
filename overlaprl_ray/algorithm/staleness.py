"""How far the policy has moved since a rollout was generated, measured and judged: the scheduler with its counts.

>>> scheduler = StalenessScheduler(StalenessConfig(kl_fresh=0.05, kl_stale=0.15, min_weight=0.1))
>>> kl = scheduler.measure_staleness(generation_logprobs=[-1.0, -2.0], current_logprobs=[-1.4, -1.7])
>>> scheduler.decide(kl)
StalenessDecision(kl_divergence=0.0600..., weight=0.909..., decision='stale', num_samples=1)
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlaprl_ray.algorithm.kl import staleness_kl
from overlaprl_ray.algorithm.rules import DECISIONS, RULES, Decision, Gate, GateInputs, kl_weight, thresholds
from overlaprl_ray.config import StalenessConfig
from overlaprl_ray.errors import RunError


@dataclass(frozen=True)
class StalenessDecision:
    """What one measured divergence leads to."""

    kl_divergence: float  # nats per token
    weight: float  # 0 to 1
    decision: Decision
    num_samples: int  # rows it was measured on


class StalenessScheduler:
    """Measures, judges and keeps count, under one configuration."""

    def __init__(self, config: StalenessConfig) -> None:
        self.config = config
        self._decisions: Counter[Decision] = Counter()
        self._kl_sum, self._kl_count, self._weight_sum = 0.0, 0, 0.0

    def calibrate(self, floor: float) -> None:
        """Take note of the numerical floor: the KL in nats measured at lag 0, where the truth is 0.

        Turns thresholds in multiples of the floor (`threshold_unit: floor`) into nats. Raises RunError when kl_stale is
        then not above the floor: every rollout would be discarded, the freshest too.
        """
        config = self.config
        if config.threshold_unit == "floor":
            nats = {"kl_fresh": config.kl_fresh * floor, "kl_stale": config.kl_stale * floor, "threshold_unit": "nats"}
            config = config.model_copy(update=nats)
        if not config.kl_stale > floor:
            raise RunError(
                f"staleness.kl_stale is {config.kl_stale:.3g} nats, not above the numerical floor {floor:.3g} measured "
                "at lag 0, so everything would be discarded; raise it, or give it in nats"
            )
        self.config = config

    def measure_staleness(
        self,
        generation_logprobs: Tensor | Sequence[float] | Sequence[Sequence[float]],
        current_logprobs: Tensor | Sequence[float] | Sequence[Sequence[float]],
        mask: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> float:
        """KL(μ || π) in nats per token from the logprobs of the generated tokens under μ, then and under π, now.

        Tensors or lists, (T,) or (B, T), all of one shape; a true `mask` entry is a token that counts (default: all
        do), each for at most `kl_token_cap`. 0.0 when none does. Raises ValueError when the shapes differ.
        """
        then, now = (
            torch.as_tensor(logprobs, dtype=torch.float64).detach()
            for logprobs in (generation_logprobs, current_logprobs)
        )
        counts = torch.ones_like(then, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
        if not then.shape == now.shape == counts.shape:
            raise ValueError(
                f"shapes differ: generation_logprobs {tuple(then.shape)}, current_logprobs {tuple(now.shape)}, "
                f"mask {tuple(counts.shape)}"
            )
        return float(staleness_kl(now - then, counts, cap=self.config.kl_token_cap))

    def decide(self, kl: float, num_samples: int = 1) -> StalenessDecision:
        """Grade one divergence by the `kl` rule, whatever rule is configured, and count it. RunError on nan."""
        _check_not_nan(kl)
        kl_fresh, kl_stale = thresholds(self.config)
        weight = kl_weight(kl, kl_fresh, kl_stale, self.config.min_weight)
        decision = DECISIONS[(kl >= kl_fresh) + (kl >= kl_stale)]
        self.record(decision, weight, kl)
        return StalenessDecision(kl, weight, decision, num_samples)

    def judge(self, inputs: GateInputs) -> Gate:
        """The configured rule's verdict on some rows; does not count: `record` an update once. RunError on nan."""
        gate = RULES[self.config.rule](inputs, self.config)
        if gate.kl is not None:
            _check_not_nan(gate.kl)
        return gate

    def record(self, decision: Decision, weight: float, kl: float | None) -> None:
        """Count what was decided about one update."""
        self._decisions[decision] += 1
        self._weight_sum += weight
        if kl is not None:
            self._kl_sum, self._kl_count = self._kl_sum + kl, self._kl_count + 1

    def state(self) -> dict[str, Any]:
        """The counts behind `summary`, to go on from."""
        return {
            "decisions": dict(self._decisions),
            "kl": (self._kl_sum, self._kl_count),
            "weight_sum": self._weight_sum,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self._decisions = Counter(state["decisions"])
        self._kl_sum, self._kl_count = state["kl"]
        self._weight_sum = state["weight_sum"]

    def summary(self) -> dict[str, float]:
        """Decisions recorded so far: how many, their shares, and the mean KL and weight (0.0 before the first)."""
        total = self._decisions.total()
        return {
            "decisions": total,
            **{name: self._decisions[name] for name in DECISIONS},
            **{f"frac_{name}": self._decisions[name] / max(total, 1) for name in DECISIONS},
            "mean_kl": self._kl_sum / max(self._kl_count, 1),
            "mean_weight": self._weight_sum / max(total, 1),
        }


def _check_not_nan(kl: float) -> None:
    if math.isnan(kl):
        raise RunError("staleness KL is nan: the logprobs of this batch are not finite; lower grpo.lr or use float32")
