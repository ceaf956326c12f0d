"""Group-relative advantages: a completion is good or bad compared with its siblings on the same prompt.

DeepSeekMath, arXiv 2402.03300, section 4.1; without the division by the standard deviation, Dr. GRPO, arXiv 2503.20783.

    >>> group_advantages(torch.tensor([0.0, 1.0, 1.0, 1.0]), group_size=2)
    tensor([-0.7070,  0.7070,  0.0000,  0.0000])
"""

import torch
from torch import Tensor

ROUNDING_ULPS = 8


def group_advantages(rewards: Tensor, group_size: int, scale: bool = True, eps: float = 1e-4) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) over each group of `group_size` adjacent rewards; without `scale`, r_i - mean.

    `rewards` is (P·G,) floating point, the G rows of a prompt next to each other: groups go by position, never by
    prompt text, so a prompt that occurs twice makes two groups. The std has Bessel's correction, as in TRL. A group of
    equal rewards gets exactly 0, and rewards count as equal when they differ by no more than the rounding of a sum of
    reward parts (0.1 + 0.2 and 0.3): a residue must not pass for signal. A NaN is a row that nobody judged: it gets 0
    and is left out of its group's mean and std. Returns (P·G,).

    Raises ValueError when `group_size` is below 2 or does not divide the number of rewards.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size is {group_size}: an advantage compares siblings, so a group needs at least 2 rows"
        )
    if rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}: expected (P*{group_size},), whole adjacent groups"
        )
    groups = rewards.reshape(-1, group_size)
    judged = ~groups.isnan()
    if not judged.all():
        advantages = torch.zeros_like(groups)
        for group, rows in enumerate(judged):
            if (count := int(rows.sum())) > 1:
                advantages[group, rows] = group_advantages(groups[group, rows], count, scale, eps)
        return advantages.reshape(-1)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    rounding = ROUNDING_ULPS * torch.finfo(rewards.dtype).eps * groups.abs().amax(dim=1, keepdim=True)
    equal = groups.amax(dim=1, keepdim=True) - groups.amin(dim=1, keepdim=True) <= rounding
    return torch.where(equal, 0.0, advantages).reshape(-1)
