"""Rules that judge stale rollouts: each a pure function from what an update can see to the weight of every row.

Δ = log π - log μ of each completion token, with μ the policy that generated and π the current one. This project's rule
(`kl`) grades by KL(μ || π): full weight while fresh, less while stale, none beyond. Beside it, on equal terms, the
rules others use: `version` (TRL async, AReaL, SkyRL), `opsm` (DeepSeek-V3.2), `m2po` (arXiv 2510.01161), `ess` (VCPO,
arXiv 2602.17616), and `random`, the control of every rule that discards. A new rule is one function and one line in
`RULES`.

    gate = RULES["kl"](GateInputs(log_ratio, mask, advantages, groups, lag=2), StalenessConfig())
    gate.weight, gate.fractions
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from overlaprl_ray.algorithm.kl import clamp_log_ratio, effective_sample_size, k3, masked_mean
from overlaprl_ray.config.staleness import DECISIONS, Decision, StalenessConfig

ESS_FRESH = 0.99  # rule ess: a weight of at least this counts as fresh


@dataclass(frozen=True)
class GateInputs:
    """What a rule may look at, for the rows of an update or of a micro-batch; no tensor carries a gradient."""

    log_ratio: Tensor  # (B, T) log π - log μ, nats; anything at masked positions
    mask: Tensor  # (B, T) bool, true on completion tokens
    advantages: Tensor  # (B,)
    groups: Tensor  # (B,) int, one label per prompt position
    lag: int | Tensor  # versions between generation and now, of all rows, or (B,) of each row's oldest token
    measured: Tensor | None = None  # (B,) bool, rows whose log_ratio is known; None: all
    draw: float = 0.0  # in [0, 1), follows from seed, batch and update: for rule `random`


@dataclass(frozen=True)
class Gate:
    """What a rule decided about those rows."""

    weight: Tensor  # (B,) factor of a row's whole loss, 0 to 1
    decision: Tensor  # (B,) int8, index into DECISIONS
    keep: Tensor | None = None  # (B, T) bool, tokens that retain their policy term; None: the clip applies instead
    kl: float | None = None  # nats per token over the measured rows; None: nothing was measured
    kl_tokens: int = 0  # tokens `kl` was measured on
    kl_max: float | None = None  # what the largest of them would add to their sum without a cap, nats

    def rows(self, rows: Tensor, tokens: int) -> "Gate":
        """What it says about rows (by ids, in their order), cut to `tokens` completion tokens."""
        keep = None if self.keep is None else self.keep[rows, :tokens]
        return replace(self, weight=self.weight[rows], decision=self.decision[rows], keep=keep)

    @property
    def fractions(self) -> dict[Decision, float]:
        """Share of rows per decision."""
        counts = torch.bincount(self.decision.long(), minlength=len(DECISIONS)).tolist()
        return {name: count / max(len(self.decision), 1) for name, count in zip(DECISIONS, counts, strict=True)}

    @property
    def verdict(self) -> Decision:
        """The decision about all rows: `fresh` or `discard` when every row is, else `stale`."""
        return overall_decision([DECISIONS[row] for row in self.decision.tolist()])


def overall_decision(decisions: Sequence[Decision]) -> Decision:
    """`fresh` or `discard` when all are (nothing to judge is fresh), else `stale`."""
    distinct = set(decisions) or {"fresh"}
    return "stale" if len(distinct) > 1 else distinct.pop()


def merge_gates(gates: Sequence[Gate]) -> Gate:
    """The gate of an update from those of its micro-batches, in row order; KL is again a mean per token."""
    tokens = sum(gate.kl_tokens for gate in gates)
    measured = [gate.kl * gate.kl_tokens for gate in gates if gate.kl is not None]
    keeps = [gate.keep for gate in gates if gate.keep is not None]
    return Gate(
        weight=torch.cat([gate.weight for gate in gates]),
        decision=torch.cat([gate.decision for gate in gates]),
        keep=torch.cat(keeps) if keeps else None,
        kl=sum(measured) / max(tokens, 1) if measured else None,
        kl_tokens=tokens,
        kl_max=max((gate.kl_max for gate in gates if gate.kl_max is not None), default=None),
    )


@overload
def kl_weight(kl: float, kl_fresh: float, kl_stale: float, min_weight: float) -> float: ...
@overload
def kl_weight(kl: Tensor, kl_fresh: float, kl_stale: float, min_weight: float) -> Tensor: ...
def kl_weight(kl: float | Tensor, kl_fresh: float, kl_stale: float, min_weight: float) -> float | Tensor:
    """1 below kl_fresh, linear from 1 to min_weight on [kl_fresh, kl_stale), 0 from kl_stale on; nan stays nan."""
    if not isinstance(kl, Tensor):
        return kl_weight(torch.tensor(kl, dtype=torch.float64), kl_fresh, kl_stale, min_weight).item()
    progress = (kl - kl_fresh) / (kl_stale - kl_fresh)
    sloped = (1 - (1 - min_weight) * progress).clamp(min=min_weight)
    return torch.where(kl < kl_fresh, 1.0, torch.where(kl >= kl_stale, 0.0, sloped))


def keep_everything(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `none`: measure, do nothing."""
    return _gate(inputs, config, torch.zeros_like(inputs.groups))


def discard_everything(rows: int) -> Gate:
    """What becomes of an update that could not be judged: its batch is at fault."""
    return Gate(torch.zeros(rows, dtype=torch.float64), torch.full((rows,), 2, dtype=torch.int8))


def grade_by_kl(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `kl`: `kl_weight` of KL(μ || π) per batch, group or sequence, over all tokens of its rows.

    Rows without signal (A = 0) count too: leaving them out would choose rows by their outcome, and where successes are
    rare that multiplies the estimate. A token counts for at most `kl_token_cap`: k3 is heavy-tailed, and one token
    could discard a batch; the bounded mean says too little of drift that rare tokens carry. Each row gets the weight of
    its batch, group or sequence; a unit without tokens, or of which nothing is measured, is fresh.
    """
    kl_fresh, kl_stale = thresholds(config)
    units = {
        "batch": torch.zeros_like(inputs.groups),
        "group": inputs.groups,
        "sequence": torch.arange(len(inputs.groups), device=inputs.groups.device),
    }
    kl, tokens, _ = _kl_by_unit(inputs, units[config.granularity], config.kl_token_cap)
    known = tokens > 0
    weight = torch.where(known, kl_weight(kl, kl_fresh, kl_stale, config.min_weight), 1.0)
    grade = (kl >= kl_fresh).to(torch.int8) + (kl >= kl_stale).to(torch.int8)
    return _gate(inputs, config, torch.where(known, grade, 0), weight=weight)


def drop_old_versions(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `version`: drop rows whose lag exceeds `max_lag` versions. Reads no log-ratio, measures no KL."""
    dropped = (torch.as_tensor(inputs.lag) > config.max_lag).expand_as(inputs.groups)
    return Gate(weight=(~dropped).double(), decision=2 * dropped.to(torch.int8))


def drop_drifted_negatives(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `opsm`: drop a sequence iff A < 0 and mean(log μ - log π) > `opsm_delta` (off-policy sequence masking)."""
    drift = -masked_mean(inputs.log_ratio.double(), inputs.mask, dim=1)
    return _gate(inputs, config, 2 * ((inputs.advantages < 0) & (drift > config.opsm_delta)))


def bound_second_moment(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `m2po`: bound the mean of Δ² by `m2po_tau` over the tokens that move away from μ; replaces the clip.

    Those are the tokens with A > 0, ρ > 1 or A < 0, ρ < 1, the ones a clip could touch. Of *these* the largest Δ² are
    dropped until the mean over the rest of these is below τ; if no single one is, all are. Of equal Δ² the later token
    goes first. A row is `stale` when it lost tokens, `discard` when it lost all.
    """
    delta = torch.where(inputs.mask, inputs.log_ratio, 0.0).double()
    outward = inputs.mask & (inputs.advantages.sign()[:, None] * delta > 0)
    squares, order = delta[outward].square().sort(stable=True)
    # The mean over the k smallest only grows with k, so what stays is the longest prefix whose mean is below τ.
    prefix_mean = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    stays = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, prefix_mean < config.m2po_tau)
    keep = (~outward).masked_scatter(outward, stays)
    lost, left = (inputs.mask & ~keep).any(dim=1), (inputs.mask & keep).any(dim=1)
    return _gate(inputs, config, lost.to(torch.int8) + (lost & ~left), weight=torch.ones_like(delta[:, 0]), keep=keep)


def scale_by_ess(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `ess`: weight √((Σw)² / (B Σw²)) with w = π/μ of whole sequences (VCPO's step scaling, arXiv 2602.17616).

    It scales the learning rate (`apply_to: lr`). Decisions are `fresh` while the weight is at least ESS_FRESH.
    """
    mask = inputs.mask if inputs.measured is None else inputs.mask & inputs.measured[:, None]
    log_weight = clamp_log_ratio(torch.where(mask, inputs.log_ratio, 0.0).double().sum(dim=1))
    weight = math.sqrt(effective_sample_size(log_weight[mask.any(dim=1)]))
    stale = torch.full_like(inputs.groups, weight < ESS_FRESH)
    return _gate(inputs, config, stale, weight=torch.full(stale.shape, weight, dtype=torch.float64))


def discard_at_random(inputs: GateInputs, config: StalenessConfig) -> Gate:
    """Rule `random`: drop everything with probability `discard_probability`, whatever it is; measures no KL."""
    dropped = torch.full_like(inputs.groups, inputs.draw < config.discard_probability, dtype=torch.bool)
    return Gate(weight=(~dropped).double(), decision=2 * dropped.to(torch.int8))


Rule = Callable[[GateInputs, StalenessConfig], Gate]

RULES: dict[str, Rule] = {
    "none": keep_everything,
    "kl": grade_by_kl,
    "version": drop_old_versions,
    "opsm": drop_drifted_negatives,
    "m2po": bound_second_moment,
    "ess": scale_by_ess,
    "random": discard_at_random,
}


def timing(rule: str, granularity: str) -> Literal["before", "rows", "after"]:
    """When an update can ask its gate.

    "before" any backward: `version` and `random`, before any forward even, and `m2po`, which looks at every token of
    the update at once. "rows": micro-batch by micro-batch, since rows (or whole groups) are judged on their own.
    "after" the update's gradients are accumulated: `kl` per batch and `ess`, whose one weight then scales them.
    """
    if rule in ("version", "random", "m2po"):
        return "before"
    return "after" if rule == "ess" or (rule == "kl" and granularity == "batch") else "rows"


def thresholds(config: StalenessConfig) -> tuple[float, float]:
    """(kl_fresh, kl_stale) in nats; ValueError while they are multiples of a floor not measured yet."""
    if config.threshold_unit == "floor":
        raise ValueError("kl_fresh and kl_stale are multiples of the numerical floor: calibrate the scheduler first")
    return config.kl_fresh, config.kl_stale


def _kl_by_unit(inputs: GateInputs, labels: Tensor, cap: float | None) -> tuple[Tensor, Tensor, float]:
    """Of the rows that share a row's label the KL and its number of tokens, for every row (B,); the largest token."""
    mask = inputs.mask if inputs.measured is None else inputs.mask & inputs.measured[:, None]
    per_token = k3(torch.where(mask, inputs.log_ratio, 0.0).double())
    bounded = per_token if cap is None else per_token.clamp(max=cap)
    names, unit = labels.unique(return_inverse=True)
    sums = per_token.new_zeros(len(names)).index_add_(0, unit, bounded.sum(dim=1))
    tokens = mask.sum(dim=1).new_zeros(len(names)).index_add_(0, unit, mask.sum(dim=1))
    return (sums / tokens.clamp(min=1))[unit], tokens[unit], float(per_token.max()) if per_token.numel() else 0.0


def _gate(
    inputs: GateInputs,
    config: StalenessConfig,
    decision: Tensor,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
) -> Gate:
    """The rows' decisions and the divergence measured; without a `weight`, rows not discarded count in full."""
    kl, tokens, largest = _kl_by_unit(inputs, torch.zeros_like(inputs.groups), config.kl_token_cap)
    if weight is None:
        weight = (decision != DECISIONS.index("discard")).double()
    gate = Gate(weight, decision.to(torch.int8), keep)
    return replace(gate, kl=float(kl[0]), kl_tokens=int(tokens[0]), kl_max=largest) if tokens[0] else gate
