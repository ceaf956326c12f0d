"""Publishing a policy: parameters as plain arrays that Ray stores once and that readers map without a copy.

published = publish(version, learner.weights(), buffers)      # in the learner
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


class HostBuffers:
    """Page-locked memory that weights are copied into from a GPU: one flat buffer per dtype, allocated once.

    Copies into it are not held up one by one as those into ordinary memory are.
    """

    def __init__(self) -> None:
        self.flat: dict[torch.dtype, Tensor] = {}

    def copy(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights' values as views of the buffers, which hold them until the next copy."""
        copies: dict[str, Tensor] = {}
        for dtype in {value.dtype for value in weights.values()}:
            mine = {name: value for name, value in weights.items() if value.dtype == dtype}
            sizes = [value.numel() for value in mine.values()]
            if dtype not in self.flat:
                self.flat[dtype] = torch.empty(sum(sizes), dtype=dtype, pin_memory=torch.cuda.is_available())
            for (name, value), part in zip(mine.items(), self.flat[dtype].split(sizes), strict=True):
                copies[name] = part.view(value.shape).copy_(value, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


def publish(version: int, weights: dict[str, Tensor], buffers: HostBuffers | None = None) -> Published:
    """Parameters as arrays, of those on a GPU through `buffers`.

    They may be views of the live policy or the buffers: Ray copies a result before the actor's next task.
    """
    weights = buffers.copy(weights) if buffers else weights
    bfloat16 = frozenset(name for name, value in weights.items() if value.dtype == torch.bfloat16)
    plain = {name: value.view(torch.int16) if name in bfloat16 else value for name, value in weights.items()}
    return Published(version, {name: value.cpu().numpy() for name, value in plain.items()}, bfloat16)


def received(published: Published) -> dict[str, Tensor]:
    """The parameters as tensors over Ray's shared, read-only memory: copy from them, never write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensors = {name: torch.from_numpy(array) for name, array in published.arrays.items()}
    return {n: t.view(torch.bfloat16) if n in published.bfloat16 else t for n, t in tensors.items()}
