"""A batch's rows counted by length, reward, difficulty and decision: the raw material of runs/summary.py."""

from collections import Counter

import torch
from torch import Tensor

from overlaprl_ray.config.staleness import DECISIONS
from overlaprl_ray.rollout import Rollout
from overlaprl_ray.workers.results import Cell


def cells_of(rollout: Rollout, decision: Tensor, group_size: int, max_new_tokens: int) -> list[Cell]:
    """Counts of rows by quarter of each trait and by decision; `decision` (B,) indexes `DECISIONS`.

    Each trait lies in 0 to 1: completion length / max_new_tokens; reward, clipped; difficulty, the mean first reward of
    the prompt's group (0: no completion solved it).
    """
    first = next(iter(rollout.reward_parts.values())).double().nan_to_num()  # NaN: nobody judged
    difficulty = first.reshape(-1, group_size).mean(dim=1).repeat_interleave(group_size)
    length = rollout.completion_mask.sum(dim=1).double() / max_new_tokens
    rewards = rollout.rewards.double().nan_to_num()
    bins = [(4 * trait).floor().clamp(0, 3).long() for trait in (length, rewards, difficulty)]
    rows = torch.stack([*bins, decision.long()], dim=1).tolist()
    return [(a, b, c, DECISIONS[d], count) for (a, b, c, d), count in sorted(Counter(map(tuple, rows)).items())]
