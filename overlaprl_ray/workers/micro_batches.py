"""Which rows go through the model together: so many rows, or as many as fit a budget of padded tokens.

By `micro_batch_size` rows stay in their order. By `micro_batch_tokens` they are sorted by length, longest first (so
that a budget too large for memory fails at once), and share a micro-batch with rows like them: less padding. Whatever
belongs to a row (its gate, its logprobs) goes by the row ids that come with each micro-batch.

    for rows, part in micro_batches(rollout, config.grpo):
        values[rows, : part.logprobs.shape[1]] = score(part)
"""

import torch
from torch import Tensor

from overlaprl_ray.config import GRPOConfig
from overlaprl_ray.rollout import Rollout, rows_of

MicroBatches = list[tuple[Tensor, Rollout]]  # (row ids (b,) int64 into the whole, those rows)


def micro_batches(
    rollout: Rollout, grpo: GRPOConfig, whole_groups: bool = False, rows: Tensor | None = None
) -> MicroBatches:
    """The micro-batches of `rows` (ids (b,) int64, ascending; None = all), each with the padding it needs itself.

    With `whole_groups` a token budget does not split a group: a rule that judges groups must see its rows together.
    """
    rows = torch.arange(len(rollout.rewards)) if rows is None else rows
    if not len(rows):
        return []
    if grpo.micro_batch_tokens is None:
        parts = list(rows.split(grpo.micro_batch_size or len(rows)))
    else:
        parts = _by_tokens(rollout, rows, grpo.micro_batch_tokens, whole_groups)
    return [(part, rows_of(rollout, part)) for part in parts]


def rows_with_signal(rollout: Rollout) -> Tensor:
    """Ids (b,) int64, ascending, of the rows whose group has an advantage that is not 0."""
    names, group = rollout.groups.unique(return_inverse=True)
    has_signal = torch.zeros(len(names), dtype=torch.bool)
    has_signal[group[rollout.advantages != 0]] = True
    return has_signal[group].nonzero().flatten()


def padded_tokens(part: Rollout) -> int:
    """Tokens that a forward pass over these rows computes, padding included."""
    return part.prompt_ids.numel() + part.completion_ids.numel()


def real_tokens(part: Rollout) -> int:
    """Non-padding tokens of these rows."""
    return int(part.prompt_mask.sum()) + int(part.completion_mask.sum())


def _by_tokens(rollout: Rollout, rows: Tensor, budget: int, whole_groups: bool) -> list[Tensor]:
    """Row ids of micro-batches of at most `budget` padded tokens; a unit (row or group) beyond it is alone."""
    prompts, completions = rollout.prompt_mask.sum(1).tolist(), rollout.completion_mask.sum(1).tolist()
    units: dict[int, list[int]] = {}
    for row in rows.tolist():
        units.setdefault(int(rollout.groups[row]) if whole_groups else row, []).append(row)

    def width(members: list[int]) -> int:
        # prompts end where completions begin, so the longest of each count, even of different rows
        return max(prompts[row] for row in members) + max(1, *(completions[row] for row in members))

    parts: list[list[int]] = []
    for unit in sorted(units.values(), key=lambda members: (-width(members), members[0])):
        joined = [*parts[-1], *unit] if parts else unit
        if parts and len(joined) * width(joined) <= budget:
            parts[-1] = joined
        else:
            parts.append(unit)
    return [torch.tensor(part) for part in parts]
