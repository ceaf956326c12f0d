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


def to_host(weights: dict[str, Tensor], buffers: dict[torch.dtype, Tensor]) -> dict[str, Tensor]:
    """Weights on a GPU as views of page-locked `buffers`, one per dtype, which the first call makes.

    Copies into such memory need not wait for one another.
    """
    copies: dict[str, Tensor] = {}
    for dtype in {value.dtype for value in weights.values()}:
        mine = {name: value for name, value in weights.items() if value.dtype == dtype}
        sizes = [value.numel() for value in mine.values()]
        if dtype not in buffers:
            buffers[dtype] = torch.empty(sum(sizes), dtype=dtype, pin_memory=torch.cuda.is_available())
        for (name, value), part in zip(mine.items(), buffers[dtype].split(sizes), strict=True):
            copies[name] = part.view(value.shape).copy_(value, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


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
