"""What flows between the parts: one batch's `Rollout`, and the padding and masks it is built from.

Shapes: B = P prompts x G completions = rows, Tp = prompt tokens (left-padded), T = completion tokens (right-padded).
All tensors are on the CPU. Rows of a group are adjacent.

    completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), eos_ids=(2,))   # [[True, True, False], [True, True, True]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the driver, which only passes references on, needs no torch
    from torch import Tensor

Span = tuple[float, float]  # start and end, seconds since the epoch


@dataclasses.dataclass(frozen=True)
class Unused:
    """What was generated for a batch and not picked from it."""

    rows: int
    tokens: int
    judged: int  # rows
    reward: float  # sum over them
    silent_groups: int  # groups without signal


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One generated and scored batch (or a generator's share of it).

    `logprobs` are of the distribution that was sampled from (temperature applied); 0 where `completion_mask` is False.
    `version` is the number of optimizer updates of the generating weights, `weights_step` the step they came after. In
    a stream weights change between tokens and these are of the oldest: no single policy has all of the `logprobs`.
    """

    batch: int
    version: int
    weights_step: int
    prompt_ids: Tensor  # (B, Tp) int64
    prompt_mask: Tensor  # (B, Tp) bool
    completion_ids: Tensor  # (B, T) int64
    completion_mask: Tensor  # (B, T) bool, True up to and including the first EOS
    logprobs: Tensor  # (B, T) float32
    rewards: Tensor  # (B,) float32, weighted sum of the parts; NaN where no reward function judged
    reward_parts: dict[str, Tensor]  # (B,) float32 each, NaN where the function abstained
    advantages: Tensor  # (B,) float32
    groups: Tensor  # (B,) int64, position of the prompt in the batch
    finished: Tensor  # (B,) bool, ended by an EOS
    prompts: list[str]  # B
    completions: list[str]  # B
    answers: list[str]  # B
    extracted: list[str | None]  # B, the answer that the first reward function reads in a completion
    generate: Span
    load: Span  # taking over the weights, before generating
    memory_gb: float
    fault: str | None = None  # why it cannot be trained on: its rewards failed
    versions: Tensor | None = None  # (B, T) int64, of the weights that sampled each token; None: all `version`
    stream: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the step's row says of its ticks
    unused: Unused | None = None  # where more was generated than is trained on
    # what reward functions logged by name, B values each
    logged: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens to train on."""
        return int(self.completion_mask.sum())


@dataclasses.dataclass(frozen=True)
class Scores:
    """The reference model's logprobs of one rollout's completions, (B, T) float32."""

    logprobs: Tensor
    span: Span
    memory_gb: float | None  # None: it has no process of its own


def completion_mask(ids: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """(B, T) bool: True up to and including each row's first EOS. Found by position, since pad may equal EOS."""
    import torch

    is_eos = torch.isin(ids, torch.tensor(list(eos_ids), dtype=ids.dtype, device=ids.device))
    eos_before = is_eos.cumsum(dim=1) - is_eos.long()
    return eos_before == 0


def pad_left(rows: Sequence[Sequence[int]], pad: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Token lists as (B, width) int64 ids and a bool mask, padded on the left, as decoder-only models generate."""
    import torch

    width = max((len(row) for row in rows), default=0) if width is None else width
    ids = torch.full((len(rows), width), pad, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row:
            ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
            mask[i, width - len(row) :] = True
    return ids, mask


def pad_right(rows: Sequence[Sequence[float]], pad: float) -> tuple[Tensor, Tensor]:
    """Number lists as (B, T) and a bool mask, padded on the right, as completions are."""
    import torch

    width = max(len(row) for row in rows)
    values = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    return values, torch.tensor([[place < len(row) for place in range(width)] for row in rows])


def position_ids(mask: Tensor) -> Tensor:
    """(B, L) int64 positions counted from each row's first real token; padding gets 0."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def row_versions(rollout: Rollout) -> Tensor:
    """(B,) version of each row's oldest token."""
    if rollout.versions is None:
        return rollout.groups.new_full(rollout.groups.shape, rollout.version)
    return rollout.versions[:, 0]


def crossed(rollout: Rollout) -> Tensor:
    """(B,) bool: rows whose tokens are not all of one version."""
    if rollout.versions is None:
        return rollout.finished.new_zeros(rollout.finished.shape)
    return ((rollout.versions != rollout.versions[:, :1]) & rollout.completion_mask).any(dim=1)


def rows_of(rollout: Rollout, rows: slice | Tensor) -> Rollout:
    """Some rows (a slice, or ids in any order), with the padding that none of them needs cut away."""
    import torch

    ids = torch.arange(len(rollout.rewards))[rows].tolist()

    def cut(value: Tensor) -> Tensor:
        return value[rows]

    def pick(values: list[Any]) -> list[Any]:
        return [values[row] for row in ids]

    prompt_mask, mask = cut(rollout.prompt_mask), cut(rollout.completion_mask)
    left = rollout.prompt_ids.shape[1] - int(prompt_mask.sum(1).max())
    right = max(1, int(mask.sum(1).max()))
    return dataclasses.replace(
        rollout,
        prompt_ids=cut(rollout.prompt_ids)[:, left:],
        prompt_mask=prompt_mask[:, left:],
        completion_ids=cut(rollout.completion_ids)[:, :right],
        completion_mask=mask[:, :right],
        logprobs=cut(rollout.logprobs)[:, :right],
        rewards=cut(rollout.rewards),
        reward_parts={name: cut(part) for name, part in rollout.reward_parts.items()},
        advantages=cut(rollout.advantages),
        groups=cut(rollout.groups),
        finished=cut(rollout.finished),
        versions=None if rollout.versions is None else cut(rollout.versions)[:, :right],
        prompts=pick(rollout.prompts),
        completions=pick(rollout.completions),
        answers=pick(rollout.answers),
        extracted=pick(rollout.extracted),
        logged={name: pick(values) for name, values in rollout.logged.items()},
    )


def batch_of(shards: Sequence[Rollout], groups: int) -> Rollout:
    """One batch out of its generators' shares: the first `groups` groups with signal, filled up with those without.

    Dynamic sampling as in DAPO (arXiv 2503.14476), with a fixed number of prompts: what is picked is a function of the
    batch alone. The picked groups keep their order.
    """
    whole = merge(shards)
    names, group = whole.groups.unique(return_inverse=True)
    if len(names) <= groups:
        return whole
    import torch

    silent = torch.ones(len(names), dtype=torch.bool)
    silent[group[whole.advantages != 0]] = False
    picked = silent.int().argsort(stable=True)[:groups]
    used = torch.isin(group, picked)
    unused = Unused(
        rows=int((~used).sum()),
        tokens=int(whole.completion_mask[~used].sum()),
        judged=int((~whole.rewards[~used].isnan()).sum()),
        reward=float(whole.rewards[~used].double().nan_to_num().sum()),
        silent_groups=int(silent.sum() - silent[picked].sum()),
    )
    return dataclasses.replace(rows_of(whole, used.nonzero().flatten()), unused=unused)


def merge(shards: Sequence[Rollout]) -> Rollout:
    """Shares of one batch as one, in row order. Padding is widened to the longest share."""
    if len(shards) == 1:
        return shards[0]
    import torch

    stamps = {(s.batch, s.version, s.weights_step) for s in shards}
    if len(stamps) != 1:
        raise ValueError(f"shares of one batch must carry one stamp, got {sorted(stamps)}")

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(s, name) for s in shards])

    def wide(name: str, left: bool) -> Tensor:
        parts = [getattr(s, name) for s in shards]
        width = max(part.shape[1] for part in parts)
        gaps = [(width - p.shape[1], 0) if left else (0, width - p.shape[1]) for p in parts]
        return torch.cat([torch.nn.functional.pad(p, gap) for p, gap in zip(parts, gaps, strict=True)])

    return dataclasses.replace(
        shards[0],
        prompt_ids=wide("prompt_ids", left=True),
        prompt_mask=wide("prompt_mask", left=True),
        completion_ids=wide("completion_ids", left=False),
        completion_mask=wide("completion_mask", left=False),
        logprobs=wide("logprobs", left=False),
        rewards=cat("rewards"),
        reward_parts={n: torch.cat([s.reward_parts[n] for s in shards]) for n in shards[0].reward_parts},
        advantages=cat("advantages"),
        groups=cat("groups"),
        finished=cat("finished"),
        prompts=[text for s in shards for text in s.prompts],
        completions=[text for s in shards for text in s.completions],
        answers=[text for s in shards for text in s.answers],
        extracted=[text for s in shards for text in s.extracted],
        generate=(min(s.generate[0] for s in shards), max(s.generate[1] for s in shards)),
        load=(min(s.load[0] for s in shards), max(s.load[1] for s in shards)),
        memory_gb=sum(s.memory_gb for s in shards),
        fault=next((s.fault for s in shards if s.fault), None),
        logged={
            name: [value for s in shards for value in s.logged.get(name, [None] * len(s.rewards))]
            for name in dict.fromkeys(name for s in shards for name in s.logged)
        },
    )
