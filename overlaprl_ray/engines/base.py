"""Engines: what turns prompts into completions with exact behaviour logprobs. `Engine` is what all of them offer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.errors import RunError

# Nats per token that an engine's logprobs may be from the learner's, on average. Rounding gives up to 1e-4 in float32
# and some 0.03 in bfloat16; another temperature, or weights that did not arrive, far more.
LIMITS = {"float32": 0.01, "bfloat16": 0.1}


def check_logprobs(difference: Tensor, mask: Tensor, dtype: str) -> None:
    """Refuse an engine whose logprobs are not those of the policy; `difference` (B, T) is of the first batch."""
    mean, limit = float(difference[mask].abs().mean()), LIMITS[dtype]
    if not mean <= limit:
        raise RunError(
            f"model.engine = 'vllm': its logprobs of the first batch are {mean:.3g} nats per token from the learner's "
            f"(limit {limit:g} in {dtype}), so it samples from another policy; use model.engine hf"
        )


class Engine(Protocol):
    """A policy held for generating; `version` is that of its weights, -1 before the first load."""

    version: int
    pad_id: int

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def load_weights(self, version: int, state: dict[str, Tensor]) -> None:
        """Take over a policy's parameters, every one of them, by name. ValueError for those of another model."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        row_seeds: Sequence[Sequence[int]] | None = None,
    ) -> Generated:
        """Complete B token lists: greedily, or with a seed per row."""
