"""AdamW over float32 master weights, whatever dtype the model computes in.

In float32 the masters are the model's own parameters. In bfloat16 they are copies: gradients of micro-batches add up in
float32, the update happens in float32, and the model gets the rounded result; a learning rate of 1e-6 would otherwise
vanish in bfloat16's 8 bits.

    optimizer = MasterAdamW(model, lr=1e-5)
    loss.backward(); optimizer.collect(); norm = optimizer.clip(1.0); optimizer.step(weight=1.0)
"""

from typing import Any, Literal

import torch
from transformers import PreTrainedModel


class MasterAdamW:
    """AdamW with (0.9, 0.999), eps 1e-8; gradients are collected, clipped, then weighted, in this order."""

    def __init__(self, model: PreTrainedModel, lr: float, weight_decay: float = 0.0):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.shared = all(p.dtype == torch.float32 for p in self.parameters)
        self.masters = self.parameters if self.shared else [p.detach().float().clone() for p in self.parameters]
        self.lr = lr
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def start_from(self, model: PreTrainedModel) -> None:
        """Take the masters from a float32 copy of the model, which may say more than its rounded weights do.

        A master that starts on bfloat16's grid must cross half of its spacing before the model's weight moves at all:
        2e-4 for a weight of 0.1, twenty steps at a learning rate of 1e-5.
        """
        exact = [p for p in model.parameters() if p.requires_grad]
        for master, parameter in zip(self.masters, exact, strict=True):
            master.copy_(parameter)

    def state(self) -> dict[str, Any]:
        """Master weights and moments, on the CPU, as copies."""
        return detached({"masters": self.masters, "adamw": self.adamw.state_dict()})

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave, into the model too."""
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self.adamw.load_state_dict(state["adamw"])
        self._write_back()

    def zero_grad(self) -> None:
        """Forget what was collected."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def collect(self) -> None:
        """Add the gradients of the backward pass just done to the masters'."""
        if self.shared:
            return  # autograd has added them up already
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def collect_nothing(self) -> None:
        """Take note of a gradient of 0 everywhere, for an update that had nothing to compute: momentum goes on."""
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    def clip(self, max_norm: float) -> float:
        """Clip the collected gradient; returns its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters, max_norm))

    @torch.no_grad()
    def step(self, weight: float = 1.0, apply_to: Literal["loss", "lr"] = "loss") -> None:
        """Update with the clipped gradient (`loss`) or the learning rate of this one step (`lr`) times `weight`."""
        if apply_to == "loss" and weight != 1.0:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(weight)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * (weight if apply_to == "lr" else 1.0)
        self.adamw.step()
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        """The masters into the model, rounded to its dtype."""
        if not self.shared:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def detached(state: Any) -> Any:
    """A deep copy on the CPU of nested dicts, lists and tuples of tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: detached(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(detached(value) for value in state)
    return state
