"""AdamW over float32 master weights, whatever dtype the model computes in.

In float32 the masters are the model's own parameters. In bfloat16 they are copies: gradients of micro-batches add up in
float32, the update happens in float32, and the model gets the rounded result; a learning rate of 1e-6 would otherwise
vanish in bfloat16's 8 bits.

    optimizer = MasterAdamW(model, config.grpo)
    loss.backward(); optimizer.collect(); norm = optimizer.clip(1.0); optimizer.step(lr=1e-5)
"""

from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from overlaprl_ray.config import GRPOConfig


class MasterAdamW:
    """AdamW (arXiv 1711.05101); gradients are collected, divided by the mean row weight, clipped, then weighted.

    Weight decay leaves norms and biases (vectors) alone, as Hugging Face's Trainer does.
    """

    def __init__(self, model: PreTrainedModel, grpo: GRPOConfig):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.shared = all(p.dtype == torch.float32 for p in self.parameters)
        self.masters = self.parameters if self.shared else [p.detach().float().clone() for p in self.parameters]
        groups = [
            {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": grpo.weight_decay},
            {"params": [p for p in self.masters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = grpo.adam_beta1, grpo.adam_beta2
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=grpo.lr, betas=betas, eps=grpo.adam_eps, fused=True
        )

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

    def clip(self, max_norm: float) -> float:
        """Clip the collected gradient; returns its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters, max_norm))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the collected gradient."""
        for master in self.masters:
            if master.grad is not None:
                master.grad.mul_(factor)

    @torch.no_grad()
    def step(self, lr: float, weight: float = 1.0, apply_to: Literal["update", "loss", "lr"] = "update") -> None:
        """Update with the clipped gradient g at rate `lr`, of which `weight` w in (0, 1] scales one thing.

        `update`: the first moment sees w g, the second g. A lone w leaves w of the batch's influence, a steady w moves
        the weights w as far. `loss`: both see w g, so that a steady w cancels. `lr`: the rate of this step alone, so
        that momentum delivers most of a lone batch's influence later. Weight decay follows the rate, and `update`'s w.
        """
        if apply_to == "loss" and weight != 1.0:
            self.scale(weight)
        direction = weight if apply_to == "update" else 1.0
        rate = lr if apply_to == "loss" else lr * weight
        # m' = β₁ m + (1 - β₁) w g is w times what AdamW makes of m / w and g: so with lr w it takes the right step
        self._scale_momentum(1 / direction)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self._scale_momentum(direction)
        self._write_back()

    def _scale_momentum(self, factor: float) -> None:
        if factor != 1.0:
            for state in self.adamw.state.values():
                state["exp_avg"].mul_(factor)

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
