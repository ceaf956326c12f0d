"""Engines: what turns prompts into completions with exact behaviour logprobs. `Engine` is what all of them offer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from overlaprl_ray.engines.hf import Generated


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
