"""The GRPO loss on log-probabilities: ratio, trust region, off-policy correction, reference penalty, aggregation.

Per token, with μ the policy that generated, π the current one and A the row's advantage (arXiv 2402.03300):

    -min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)A) + β ρ k3(π_ref/π)        ρ = π/μ

Variants: token or sequence ratio (GSPO, arXiv 2507.18071), dual clip (arXiv 1912.09729), CISPO (MiniMax-M1, arXiv
2506.13585: -sg(min(ρ, 1 + ε_high)) A log π, with a gradient for every token), sums per sequence, per batch (DAPO, arXiv
2503.14476) or per token budget (Dr. GRPO, arXiv 2503.20783). Corrections by w = π_prox/μ: truncated importance
sampling, decoupled PPO (AReaL, arXiv 2505.24298), IcePop (arXiv 2510.18855), and SkyRL's mask of sequences by the
geometric mean of w. Micro-batches add up: each is divided by the `normalizer` of the whole update.

    whole = normalizer("dapo", rows=len(mask), tokens=int(mask.sum()), max_new_tokens=64)
    for part in torch.arange(len(mask)).split(8):
        grpo_loss(grpo, policy(part), behaviour[part], advantages[part], mask[part], whole).loss.backward()
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from overlaprl_ray.algorithm.kl import clamp_log_ratio, masked_mean, reference_penalty
from overlaprl_ray.config import GRPOConfig


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's share of an update, 0-d tensors: every field adds up over micro-batches, then divide."""

    loss: Tensor  # to call backward() on; policy loss + beta · reference penalty
    policy_loss: Tensor  # its policy part
    kl_ref: Tensor  # sum over tokens of the reference penalty, ratio included, before beta and row weights
    clip_low: Tensor  # tokens with A < 0 beyond the trust region
    clip_high: Tensor  # tokens with A > 0 beyond it
    ratio_sum: Tensor  # sum over tokens of π/μ
    tokens: Tensor  # tokens that count


def normalizer(loss_type: str, rows: int, tokens: int, max_new_tokens: int) -> float:
    """What the summed loss of a whole update is divided by, from the whole update's rows and completion tokens."""
    match loss_type:
        case "grpo":
            return float(rows)
        case "dapo" | "cispo":
            return float(max(tokens, 1))
        case "dr_grpo":
            return float(rows * max_new_tokens)
        case _:
            raise ValueError(f"unknown loss_type {loss_type!r}: choose grpo, dapo, dr_grpo or cispo")


def grpo_loss(
    grpo: GRPOConfig,
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    normalizer: float,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    row_weight: Tensor | None = None,
    keep: Tensor | None = None,
) -> LossOutput:
    """The loss of one micro-batch of an update.

    `logprobs` (B, T, with grad), `behaviour`, `proximal` and `reference` (B, T) are log π, log μ, log π_prox and log
    π_ref of the completion tokens, nats; `advantages` and `row_weight` are (B,); `mask` and `keep` are (B, T) bool.
    Positions outside `mask` may hold anything, inf and nan included.

    `proximal` is the policy at the start of this batch's updates; None says that this is the first of them, where it is
    the current policy. `row_weight` multiplies a row's whole loss, penalty included. A token that `keep` drops loses
    its policy term only; `keep` replaces the clip (M2PO; a dual clip stays), and clip_low and clip_high then count its
    drops. Whatever is weighted down or dropped stays in the normalizer. A row without tokens contributes 0.

    Raises ValueError when beta > 0 and there is no `reference`.
    """
    if grpo.beta and reference is None:
        raise ValueError(f"beta is {grpo.beta} but no reference logprobs were given")
    # Padding is cut off before any arithmetic: masking a nan by a multiplication leaves a nan, in the gradient too.
    logprobs, behaviour = _within(mask, logprobs), _within(mask, behaviour)
    proximal = logprobs.detach() if proximal is None else _within(mask, proximal).detach()
    advantage = advantages[:, None]

    anchor = behaviour if grpo.correction == "none" else proximal
    ratio = _ratio(logprobs - anchor, mask, grpo.importance_level)
    surrogate, low, high = _trust_region(grpo, ratio, advantage, mask, keep)
    if grpo.loss_type == "cispo":
        capped = ratio.detach().clamp(max=grpo.trust_region[1] if keep is None else math.inf)
        surrogate = _within(mask if keep is None else keep, capped * advantage * logprobs)
    policy = -_correction_weight(grpo, proximal - behaviour, mask) * surrogate
    if reference is None:
        penalty = torch.zeros_like(policy)
    else:
        sampled_from = behaviour if grpo.use_bias_correction_kl else None
        penalty = reference_penalty(logprobs, _within(mask, reference), grpo.kl_penalty, sampled_from)

    def aggregate(per_token: Tensor) -> Tensor:
        rows = _within(mask, per_token).sum(dim=1)
        if grpo.loss_type == "grpo":
            rows = rows / mask.sum(dim=1).clamp(min=1)
        return (rows if row_weight is None else rows * row_weight.to(rows.dtype)).sum() / normalizer

    return LossOutput(
        loss=aggregate(policy + grpo.beta * penalty),
        policy_loss=aggregate(policy.detach()),
        kl_ref=_within(mask, penalty.detach()).sum(),
        clip_low=low.sum(),
        clip_high=high.sum(),
        ratio_sum=_within(mask, clamp_log_ratio(logprobs.detach() - behaviour).exp()).sum(),
        tokens=mask.sum(),
    )


def _within(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def _ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp of the token's log-ratio, or of its row's mean for every token of the row; (B, T)."""
    if level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(mask)
    return clamp_log_ratio(log_ratio).exp()


def _trust_region(
    grpo: GRPOConfig, ratio: Tensor, advantage: Tensor, mask: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The surrogate to maximise (B, T), and which tokens with A < 0 and with A > 0 lie beyond the trust region."""
    surrogate = ratio * advantage
    if keep is None:
        lowest, highest = grpo.trust_region
        surrogate = torch.minimum(surrogate, ratio.clamp(lowest, highest) * advantage)
        low, high = ratio < lowest, ratio > highest
    else:
        low = high = ~keep
    if grpo.dual_clip is not None:
        surrogate = torch.where(advantage < 0, surrogate.maximum(grpo.dual_clip * advantage), surrogate)
    if keep is not None:
        surrogate = _within(keep, surrogate)
    return surrogate, mask & low & (advantage < 0), mask & high & (advantage > 0)


def _correction_weight(grpo: GRPOConfig, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """w = π_prox/μ capped, or 0 where it leaves its bounds; 1 without correction; (B, T), no gradient."""
    if grpo.correction == "none":
        return torch.ones_like(log_ratio)
    low, high = grpo.kept_ratios
    if grpo.correction == "sequence_mask":  # drops rows, and reweights none
        mean = _ratio(log_ratio, mask, "sequence")
        return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)
    weight = _ratio(log_ratio, mask, grpo.importance_level)
    if grpo.correction == "truncated":
        return weight.clamp(max=grpo.correction_cap)
    kept = weight <= grpo.correction_cap if grpo.correction == "decoupled" else (weight >= low) & (weight <= high)
    return torch.where(kept, weight, 0.0)
