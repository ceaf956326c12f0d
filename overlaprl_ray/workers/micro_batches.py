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
    rollout: Rollout,
    grpo: GRPOConfig,
    whole_groups: bool = False,
    rows: Tensor | None = None,
    shared: bool = False,
) -> MicroBatches:
    """The micro-batches of `rows` (ids (b,) int64, ascending; None = all), each with the padding it needs itself.

    With `whole_groups` a token budget does not split a group: a rule that judges groups must see its rows together.
    With `shared` (prompts can be) it splits none that fits it.
    """
    rows = torch.arange(len(rollout.rewards)) if rows is None else rows
    if not len(rows):
        return []
    if grpo.micro_batch_tokens is None:
        parts = list(rows.split(grpo.micro_batch_size or len(rows)))
    else:
        parts = _by_tokens(rollout, rows, grpo.micro_batch_tokens, whole_groups, shared)
    return [(part, rows_of(rollout, part)) for part in parts]


def rows_with_signal(rollout: Rollout) -> Tensor:
    """Ids (b,) int64, ascending, of the rows whose group has an advantage that is not 0."""
    names, group = rollout.groups.unique(return_inverse=True)
    has_signal = torch.zeros(len(names), dtype=torch.bool)
    has_signal[group[rollout.advantages != 0]] = True
    return has_signal[group].nonzero().flatten()


def _by_tokens(rollout: Rollout, rows: Tensor, budget: int, whole_groups: bool, shared: bool) -> list[Tensor]:
    """Row ids of micro-batches of at most `budget` padded tokens; a unit (row or group) beyond it is alone."""
    prompts, completions = rollout.prompt_mask.sum(1).tolist(), rollout.completion_mask.sum(1).tolist()
    groups: dict[int, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(int(rollout.groups[row]), []).append(row)

    def width(members: list[int]) -> int:
        # prompts end where completions begin, so the longest of each count, even of different rows
        return max(prompts[row] for row in members) + max(1, *(completions[row] for row in members))

    units: list[list[int]] = []
    for group in groups.values():
        together = whole_groups or (shared and len(group) * width(group) <= budget)
        units.extend([group] if together else [[row] for row in group])
    parts: list[list[int]] = []
    for unit in sorted(units, key=lambda members: (-width(members), members[0])):
        joined = [*parts[-1], *unit] if parts else unit
        if parts and len(joined) * width(joined) <= budget:
            parts[-1] = joined
        else:
            parts.append(unit)
    return [torch.tensor(part) for part in parts]
