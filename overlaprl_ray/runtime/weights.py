"""Publishing a policy: parameters as plain arrays that Ray stores once and that readers map without a copy.

published = publish(version, learner.weights())               # in the learner
engine.load_weights(published.version, received(published))   # in a generator
"""

import dataclasses
import warnings

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Published:
    """A policy's parameters and the number of optimizer updates behind them."""

    version: int
    arrays: dict[str, np.ndarray]  # bfloat16 travels as int16: numpy has no such type
    bfloat16: frozenset[str]


def publish(version: int, weights: dict[str, Tensor]) -> Published:
    """Parameters as arrays. They may be views of the live policy: Ray copies a result before the actor's next task."""
    bfloat16 = frozenset(name for name, value in weights.items() if value.dtype == torch.bfloat16)
    plain = {name: value.view(torch.int16) if name in bfloat16 else value for name, value in weights.items()}
    return Published(version, {name: value.cpu().numpy() for name, value in plain.items()}, bfloat16)


def received(published: Published) -> dict[str, Tensor]:
    """The parameters as tensors over Ray's shared, read-only memory: copy from them, never write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensors = {name: torch.from_numpy(array) for name, array in published.arrays.items()}
    return {n: t.view(torch.bfloat16) if n in published.bfloat16 else t for n, t in tensors.items()}
