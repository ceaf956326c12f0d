"""Estimators of the Kullback-Leibler divergence from samples, and the two places where GRPO needs one.

For x ~ p and r = q(x) / p(x), three estimators of KL(p || q) (Schulman 2020, http://joschu.net/blog/kl-approx.html):
k1 = -log r (unbiased, any sign), k2 = ½ log² r (biased, always positive), k3 = r - 1 - log r (unbiased, never
negative). Everything is in nats per token.

    >>> k3(torch.tensor([0.0, 1e-4]))     # x ~ p, given log q(x) - log p(x)
    tensor([0.0000e+00, 5.0002e-09])
"""

from typing import Literal

import torch
from torch import Tensor

KLPenalty = Literal["k3", "k2", "straight_through"]

LOG_RATIO_LIMIT = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Bound a log-ratio to ±20 nats, so that its exponential stays finite; the gradient beyond is 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_r: Tensor) -> Tensor:
    """-log r, elementwise; `log_r` = log q(x) - log p(x) with x ~ p, any shape."""
    return -clamp_log_ratio(log_r)


def k2(log_r: Tensor) -> Tensor:
    """½ log² r, elementwise; `log_r` = log q(x) - log p(x) with x ~ p, any shape."""
    return clamp_log_ratio(log_r).square() / 2


def k3(log_r: Tensor) -> Tensor:
    """r - 1 - log r, elementwise and in the dtype of `log_r` = log q(x) - log p(x) with x ~ p, any shape.

    Computed as expm1(log r) - log r in float64: near 0 the value is ½ log² r, below what float32 can subtract.
    """
    exact = clamp_log_ratio(log_r.double())
    return (exact.expm1() - exact).to(log_r.dtype)


def reference_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, kind: KLPenalty, behaviour: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(π || π_ref), nats; all arguments and the result are (B, T).

    With `behaviour` = log μ of the policy that sampled the tokens, each estimate is multiplied by ρ = π/μ (the token's
    own ratio, clamped at ± 20 nats, never clipped otherwise). Per token, given its prefix (which still comes from μ),
    the mean over μ is then the mean over π, and the gradient is that of KL(π || π_ref), on- and off-policy:

    - `k3`: unbiased value; ρ carries the gradient of sampling, as in TRL's `use_bias_correction_kl`.
    - `k2`: biased value; its own gradient is the KL's already, so ρ is held constant.
    - `straight_through`: the value of k3 with the gradient of k2.

    Without `behaviour` the tokens are taken to come from π itself: wrong by orders of magnitude once they do not.
    """
    log_r = reference_logprobs - logprobs
    ratio = torch.ones_like(log_r) if behaviour is None else clamp_log_ratio(logprobs - behaviour).exp()
    match kind:
        case "k3":
            return ratio * k3(log_r)
        case "k2":
            return ratio.detach() * k2(log_r)
        case "straight_through":
            surrogate = k2(log_r)
            return ratio.detach() * (surrogate + (k3(log_r) - surrogate).detach())
        case _:
            raise ValueError(f"unknown kl_penalty {kind!r}: choose k3, k2 or straight_through")


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` (bool, same shape) holds, over `dim` or over everything; 0 where nothing is left.

    Whatever stands at masked positions, inf and nan included, reaches neither the mean nor its gradient.
    """
    return torch.where(mask, values, 0.0).sum(dim) / mask.sum(dim).clamp(min=1)


def staleness_kl(log_ratio: Tensor, mask: Tensor, dim: int | None = None, cap: float | None = None) -> Tensor:
    """Per-token KL(μ || π), nats, of the policy μ that generated from the policy π of now, in float64.

    `log_ratio` = log π - log μ of tokens sampled from μ, (..., T), and `mask` alike. The mean of k3 over the tokens
    that count is unbiased, never negative, and does not grow with length. Over `dim` (-1: per sequence) or over
    everything; 0.0 where no token counts. With `cap` (nats) a token counts for at most that: then it is a lower bound.

    μ is what was sampled from. In a stream that is no single policy for a row whose weights changed between two tokens:
    its keys and values are of older weights.
    """
    per_token = k3(torch.where(mask, log_ratio, 0.0).double())
    return masked_mean(per_token if cap is None else per_token.clamp(max=cap), mask, dim)


def effective_sample_size(log_weight: Tensor) -> float:
    """(Σw)² / (N Σw²) in (0, 1] of N importance weights, given as logarithms (N,); 1 without any.

    1 says that all weigh the same, 1/N that one carries everything.
    """
    if not len(log_weight):
        return 1.0
    weight = (log_weight.double() - log_weight.double().max()).exp()  # the scale cancels; this one cannot overflow
    return float(weight.sum().square() / (len(weight) * weight.square().sum()))
