"""The GRPO loss and its gradient against a loop over single tokens written from the formulae, and its traps."""

import math
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from overlaprl_ray.algorithm.loss import LossOutput, grpo_loss, normalizer
from overlaprl_ray.config import GRPOConfig

MAX_NEW_TOKENS = 9

PLAIN = GRPOConfig(
    clip_eps=0.2,
    clip_eps_high=0.3,
    dual_clip=None,
    beta=0.0,
    kl_penalty="k3",
    loss_type="grpo",
    importance_level="token",
    correction="none",
    correction_cap=1.5,
    correction_band=(0.7, 3.0),
)


def changed(settings: GRPOConfig, **values: Any) -> GRPOConfig:
    return settings.model_copy(update=values)


@dataclass
class Batch:
    logprobs: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    def __getitem__(self, rows: Any) -> "Batch":
        return Batch(**{name: tensor[rows] for name, tensor in vars(self).items()})


@pytest.fixture
def batch() -> Batch:
    """8 ragged rows of up to 6 tokens, one of them empty and one without signal, ratios well beyond every clip."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(8, 6, dtype=torch.float64, generator=generator)

    drift = torch.tensor([0.9, -0.9, 0.3, 0.9, -0.4, 0.0, -0.9, 0.6], dtype=torch.float64)[:, None]  # so rows clip too
    behaviour = -2 + noise(0.5)
    proximal = behaviour + noise(0.5) + drift
    logprobs = proximal + noise(0.5) + drift
    advantages = torch.tensor([1.2, -0.8, 0.0, -1.5, 0.6, -1.0, -0.4, 0.9], dtype=torch.float64)
    lengths = torch.tensor([6, 1, 4, 5, 2, 0, 6, 3])
    return Batch(
        logprobs=logprobs,
        behaviour=behaviour,
        proximal=proximal,
        reference=logprobs + noise(0.7),
        advantages=advantages,
        mask=torch.arange(6) < lengths[:, None],
    )


def whole_normalizer(settings: GRPOConfig, mask: Tensor) -> float:
    return normalizer(settings.loss_type, len(mask), int(mask.sum()), MAX_NEW_TOKENS)


def evaluate(
    settings: GRPOConfig, batch: Batch, whole: float | None = None, **options: Any
) -> tuple[LossOutput, Tensor]:
    """The loss of a batch and its gradient with respect to the logprobs."""
    logprobs = batch.logprobs.clone().requires_grad_()
    if settings.beta:
        options.setdefault("reference", batch.reference)
    if whole is None:
        whole = whole_normalizer(settings, batch.mask)
    output = grpo_loss(settings, logprobs, batch.behaviour, batch.advantages, batch.mask, whole, **options)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


def naive(
    settings: GRPOConfig,
    batch: Batch,
    proximal: Tensor | None = None,
    row_weight: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[float, Tensor]:
    """The same, token by token: plain arithmetic on float64 scalars, differentiated by autograd."""
    rows, width = batch.mask.shape
    x = [[batch.logprobs[i, t].clone().requires_grad_() for t in range(width)] for i in range(rows)]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(rows):
        tokens = [t for t in range(width) if batch.mask[i, t]]
        if not tokens:
            continue
        advantage = batch.advantages[i].item()
        mu = [batch.behaviour[i, t].item() for t in range(width)]
        prox = [(x[i][t].item() if proximal is None else proximal[i, t].item()) for t in range(width)]
        anchor = mu if settings.correction == "none" else prox
        terms = []
        for t in tokens:
            if settings.importance_level == "token":
                ratio = torch.exp(x[i][t] - anchor[t])
                weight = math.exp(prox[t] - mu[t])
            else:
                ratio = torch.exp(torch.stack([x[i][s] - anchor[s] for s in tokens]).mean())
                weight = math.exp(sum(prox[s] - mu[s] for s in tokens) / len(tokens))
            if settings.correction == "none":
                weight = 1.0
            elif settings.correction == "sequence_mask":
                mean = math.exp(sum(prox[s] - mu[s] for s in tokens) / len(tokens))
                weight = float(0.7 <= mean <= 3)
            elif settings.correction == "icepop":
                weight = weight if 0.7 <= weight <= 3 else 0.0
            elif settings.correction == "truncated":
                weight = min(weight, settings.correction_cap)
            elif weight > settings.correction_cap:
                weight = 0.0
            value = ratio * advantage
            if keep is None:
                low, high = settings.trust_region
                clipped = min(max(ratio.item(), low), high) * advantage
                if clipped < value.item():
                    value = torch.tensor(clipped, dtype=torch.float64)
            if settings.dual_clip is not None and advantage < 0 and value.item() < settings.dual_clip * advantage:
                value = torch.tensor(settings.dual_clip * advantage, dtype=torch.float64)
            if keep is not None and not keep[i, t]:
                value = torch.zeros((), dtype=torch.float64)
            if settings.loss_type == "cispo":
                capped = ratio.item() if keep is not None else min(ratio.item(), settings.trust_region[1])
                value = capped * advantage * x[i][t] * (1.0 if keep is None else float(keep[i, t]))
            term = -weight * value
            if settings.beta:
                log_r = batch.reference[i, t].item() - x[i][t]
                k3 = torch.exp(log_r) - 1 - log_r
                k2 = log_r**2 / 2
                # the token's own π/μ, whatever the surrogate's ratio; constant where the gradient is k2's
                rho = torch.exp(x[i][t] - mu[t]) if settings.use_bias_correction_kl else torch.ones(()).double()
                penalties = {
                    "k2": rho.item() * k2,
                    "k3": rho * k3,
                    "straight_through": rho.item() * (k2 - k2.item() + k3.item()),
                }
                term = term + settings.beta * penalties[settings.kl_penalty]
            terms.append(term)
        row = sum(terms) / len(terms) if settings.loss_type == "grpo" else sum(terms)
        total = total + row * (1.0 if row_weight is None else row_weight[i].item())
    count = int(batch.mask.sum())
    total = total / {"grpo": rows, "dapo": count, "cispo": count, "dr_grpo": rows * MAX_NEW_TOKENS}[settings.loss_type]
    gradients = torch.autograd.grad(
        total, [value for row in x for value in row], allow_unused=True, materialize_grads=True
    )
    return total.item(), torch.stack(gradients).reshape(rows, width)


def assert_equals_naive(settings: GRPOConfig, batch: Batch, **options: Any) -> None:
    output, gradient = evaluate(settings, batch, **options)
    expected_loss, expected_gradient = naive(settings, batch, **options)
    assert output.loss.item() == pytest.approx(expected_loss, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------- against the formulae


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["none", "truncated"])
def test_the_batch_reaches_every_clip_and_cap(batch: Batch, level: Any, correction: Any) -> None:
    settings = changed(PLAIN, importance_level=level, correction=correction)
    output, gradient = evaluate(settings, batch, proximal=batch.proximal)
    assert output.clip_low > 0
    assert output.clip_high > 0
    _, dual_clipped = evaluate(changed(settings, dual_clip=1.8), batch, proximal=batch.proximal)
    assert not torch.equal(gradient, dual_clipped)
    kinds = ("none", "truncated", "decoupled", "icepop", "sequence_mask")
    gradients = [evaluate(changed(settings, correction=c), batch, proximal=batch.proximal)[1] for c in kinds]
    assert not any(torch.equal(one, other) for one, other in combinations(gradients, 2))


@pytest.mark.parametrize("later_update", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("loss_type", "importance_level", "correction"),
    list(
        product(
            ["grpo", "dapo", "dr_grpo", "cispo"],
            ["token", "sequence"],
            ["none", "truncated", "decoupled", "icepop", "sequence_mask"],
        )
    ),
)
def test_equals_the_formula(
    batch: Batch, loss_type: Any, importance_level: Any, correction: Any, later_update: bool
) -> None:
    settings = changed(PLAIN, loss_type=loss_type, importance_level=importance_level, correction=correction, beta=0.1)
    assert_equals_naive(settings, batch, proximal=batch.proximal if later_update else None)


@pytest.mark.parametrize("kl_penalty", ["k2", "k3", "straight_through"])
@pytest.mark.parametrize(("dual_clip", "corrected"), [(None, True), (1.1, True), (1.8, True), (None, False)])
def test_dual_clip_and_penalties_equal_the_formula(
    batch: Batch, dual_clip: Any, corrected: bool, kl_penalty: Any
) -> None:
    settings = changed(PLAIN, dual_clip=dual_clip, kl_penalty=kl_penalty, use_bias_correction_kl=corrected)
    assert_equals_naive(changed(settings, beta=0.3), batch)


@pytest.mark.parametrize("dual_clip", [None, 1.8])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_row_weight_and_keep_equal_the_formula(batch: Batch, loss_type: Any, dual_clip: Any) -> None:
    settings = changed(PLAIN, loss_type=loss_type, beta=0.1, dual_clip=dual_clip)
    keep = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    weight = torch.linspace(0, 1, 8, dtype=torch.float64)
    assert_equals_naive(settings, batch, keep=keep, row_weight=weight)
    assert_equals_naive(settings, batch, row_weight=weight)


def test_clipping_stops_the_gradient_on_the_right_side_only() -> None:
    """ρ = 0.5, 1, 2 for A = +1 and A = -1: a good token stops above 1.3, a bad one below 0.8."""
    ratios = torch.tensor([[0.5, 1.0, 2.0]] * 2, dtype=torch.float64)
    zeros, mask = torch.zeros_like(ratios), torch.ones(2, 3, dtype=torch.bool)
    batch = Batch(ratios.log(), zeros, zeros, zeros, torch.tensor([1.0, -1.0]).double(), mask)
    settings = changed(PLAIN, loss_type="dapo")
    output, gradient = evaluate(settings, batch)
    torch.testing.assert_close(gradient * 6, torch.tensor([[-0.5, -1.0, 0.0], [0.0, 1.0, 2.0]]).double())
    assert (output.clip_low.item(), output.clip_high.item()) == (1, 1)
    assert output.loss.item() * 6 == pytest.approx(-(0.5 + 1 + 1.3) + (0.8 + 1 + 2))
    _, gradient = evaluate(changed(settings, dual_clip=1.5), batch)
    torch.testing.assert_close(gradient * 6, torch.tensor([[-0.5, -1.0, 0.0], [0.0, 1.0, 0.0]]).double())


def test_counts_and_sums(batch: Batch) -> None:
    output, _ = evaluate(changed(PLAIN, beta=0.1), batch)
    ratio = (batch.logprobs - batch.behaviour).exp()
    low = high = 0
    kl = ratio_sum = 0.0
    for i, t in batch.mask.nonzero().tolist():
        low += int(batch.advantages[i] < 0 and ratio[i, t] < 0.8)
        high += int(batch.advantages[i] > 0 and ratio[i, t] > 1.3)
        log_r = (batch.reference[i, t] - batch.logprobs[i, t]).item()
        kl += ratio[i, t].item() * (math.exp(log_r) - 1 - log_r)
        ratio_sum += ratio[i, t].item()
    assert min(low, high) > 0
    assert (output.clip_low.item(), output.clip_high.item(), output.tokens.item()) == (
        low,
        high,
        batch.mask.sum().item(),
    )
    assert output.kl_ref.item() == pytest.approx(kl, rel=1e-10)
    assert output.ratio_sum.item() == pytest.approx(ratio_sum, rel=1e-10)
    assert output.policy_loss.item() == pytest.approx(naive(PLAIN, batch)[0], rel=1e-10)
    assert not any(value.requires_grad for name, value in vars(output).items() if name != "loss")


def test_the_penalty_is_measured_even_where_beta_is_zero(batch: Batch) -> None:
    with_reference, gradient = evaluate(PLAIN, batch, reference=batch.reference)
    without, expected = evaluate(PLAIN, batch)
    assert with_reference.kl_ref > 0 == without.kl_ref
    assert with_reference.loss == without.loss
    assert torch.equal(gradient, expected)


def test_beta_without_a_reference_is_an_error(batch: Batch) -> None:
    with pytest.raises(ValueError, match="reference"):
        grpo_loss(changed(PLAIN, beta=0.1), batch.logprobs, batch.behaviour, batch.advantages, batch.mask, 8.0)


def test_an_unknown_loss_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="loss_type"):
        normalizer("bnpo", 1, 1, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["truncated", "decoupled", "icepop", "sequence_mask"])
def test_on_policy_corrections_change_nothing(batch: Batch, correction: Any, level: Any) -> None:
    """μ = π_prox: w = 1 and r = ρ, at the first update and, after π has moved, at the second."""
    none = changed(PLAIN, importance_level=level)
    for now in (batch.behaviour, batch.logprobs):
        on_policy = replace(batch, logprobs=now)
        expected, expected_gradient = evaluate(none, on_policy)
        output, gradient = evaluate(changed(none, correction=correction), on_policy, proximal=batch.behaviour)
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correction", ["truncated", "decoupled"])
def test_no_gradient_goes_through_the_proximal_policy(batch: Batch, correction: Any) -> None:
    settings = changed(PLAIN, correction=correction)
    _, expected = evaluate(settings, batch)
    logprobs = batch.logprobs.clone().requires_grad_()
    whole = whole_normalizer(settings, batch.mask)
    grpo_loss(
        settings, logprobs, batch.behaviour, batch.advantages, batch.mask, whole, proximal=logprobs
    ).loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, expected)


def test_with_stored_logprobs_the_ratio_is_not_one(batch: Batch) -> None:
    """Recomputing log μ with the current weights would give ρ = 1 everywhere and kill the clip."""
    output, _ = evaluate(PLAIN, batch)
    recomputed, _ = evaluate(PLAIN, replace(batch, behaviour=batch.logprobs))
    assert output.clip_low + output.clip_high > 0
    assert recomputed.clip_low + recomputed.clip_high == 0
    assert recomputed.ratio_sum == recomputed.tokens


# ---------------------------------------------------------------------------------------- micro-batches and normalisers


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_add_up(batch: Batch, loss_type: Any, level: Any, size: int) -> None:
    settings = changed(PLAIN, loss_type=loss_type, importance_level=level, beta=0.1, correction="truncated")
    whole = whole_normalizer(settings, batch.mask)
    weight = torch.linspace(0.2, 1, 8, dtype=torch.float64)
    expected, expected_gradient = evaluate(settings, batch, proximal=batch.proximal, row_weight=weight)
    parts = [
        evaluate(settings, batch[rows], whole, proximal=batch.proximal[rows], row_weight=weight[rows])
        for rows in torch.arange(8).split(size)
    ]
    for name, value in vars(expected).items():
        total = sum(getattr(output, name) for output, _ in parts)
        torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), expected_gradient, rtol=1e-12, atol=1e-12)


def test_averaging_token_means_over_micro_batches_would_be_wrong(batch: Batch) -> None:
    """Each micro-batch by its own token count, then averaged: not the batch's token mean, since lengths differ."""
    settings = changed(PLAIN, loss_type="dapo")
    expected, _ = evaluate(settings, batch)
    parts = torch.arange(8).split(4)
    averaged = sum(evaluate(settings, batch[rows])[0].policy_loss for rows in parts) / len(parts)
    whole = whole_normalizer(settings, batch.mask)
    summed = float(sum(evaluate(settings, batch[rows], whole)[0].policy_loss for rows in parts))
    assert summed == pytest.approx(expected.loss.item(), rel=1e-12)
    assert abs(averaged - expected.loss) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_dropped_rows_stay_in_the_normalizer(batch: Batch, loss_type: Any) -> None:
    """Weight 0 on the second half leaves the first half's gradient as it was; removing those rows would inflate it."""
    settings = changed(PLAIN, loss_type=loss_type, beta=0.1)
    _, whole = evaluate(settings, batch)
    _, dropped = evaluate(settings, batch, row_weight=torch.tensor([1.0] * 4 + [0.0] * 4))
    torch.testing.assert_close(dropped[:4], whole[:4], rtol=1e-12, atol=1e-12)
    assert not dropped[4:].any()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_dropped_tokens_lose_their_policy_term_only(batch: Batch, loss_type: Any) -> None:
    settings = changed(PLAIN, loss_type=loss_type, beta=0.1)
    keep = torch.ones_like(batch.mask)
    _, all_kept = evaluate(settings, batch, keep=keep)
    _, penalty_only = evaluate(settings, replace(batch, advantages=torch.zeros(8).double()))
    keep[:, ::2] = False
    output, gradient = evaluate(settings, batch, keep=keep)
    torch.testing.assert_close(gradient, torch.where(keep, all_kept, penalty_only), rtol=1e-12, atol=1e-12)
    dropped = batch.mask & ~keep
    assert output.clip_low == (dropped & (batch.advantages < 0)[:, None]).sum()
    assert output.clip_high == (dropped & (batch.advantages > 0)[:, None]).sum()


def test_keep_replaces_the_clip(batch: Batch) -> None:
    _, gradient = evaluate(PLAIN, batch, keep=torch.ones_like(batch.mask))
    wide, expected = evaluate(changed(PLAIN, clip_eps=None, clip_eps_high=None), batch)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert wide.clip_low + wide.clip_high == 0


def test_unit_weights_change_no_bit(batch: Batch) -> None:
    """A rule that does not fire must leave a run equal, bit for bit, to one without a rule; in float32 too."""
    single = replace(batch, **{n: v.float() for n, v in vars(batch).items() if v.is_floating_point()})
    plain, gradient = evaluate(changed(PLAIN, beta=0.1), single)
    weighted, weighted_gradient = evaluate(changed(PLAIN, beta=0.1), single, row_weight=torch.ones(8).double())
    assert plain.loss.dtype == weighted.loss.dtype == torch.float32
    assert torch.equal(plain.loss, weighted.loss)
    assert torch.equal(gradient, weighted_gradient)


def test_rows_without_signal_give_no_policy_gradient(batch: Batch) -> None:
    _, gradient = evaluate(PLAIN, batch)
    assert batch.advantages[2] == 0
    assert not gradient[2].any()
    assert gradient[0].any()


# ------------------------------------------------------------------------------------------------------- floating point


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["none", "truncated", "decoupled"])
@pytest.mark.parametrize("kl_penalty", ["k2", "k3", "straight_through"])
def test_masked_positions_reach_nothing(
    batch: Batch, garbage: float, level: Any, correction: Any, kl_penalty: Any
) -> None:
    settings = changed(PLAIN, importance_level=level, correction=correction, beta=0.1, kl_penalty=kl_penalty)
    names = ("logprobs", "behaviour", "proximal", "reference")
    dirty = replace(batch, **{n: getattr(batch, n).masked_fill(~batch.mask, garbage) for n in names})
    expected, expected_gradient = evaluate(settings, batch, proximal=batch.proximal)
    output, gradient = evaluate(settings, dirty, proximal=dirty.proximal)
    assert {name: value.item() for name, value in vars(output).items()} == {
        name: value.item() for name, value in vars(expected).items()
    }
    assert torch.equal(gradient, expected_gradient)
    assert not gradient[~batch.mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["none", "truncated", "decoupled"])
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_far_ratios_stay_finite(dtype: torch.dtype, level: Any, correction: Any, far: float) -> None:
    shape = (2, 3)
    batch = Batch(
        logprobs=torch.full(shape, far, dtype=dtype),
        behaviour=torch.zeros(shape, dtype=dtype),
        proximal=torch.full(shape, far / 2, dtype=dtype),
        reference=torch.full(shape, -far, dtype=dtype),
        advantages=torch.tensor([1.0, -1.0], dtype=dtype),
        mask=torch.ones(shape, dtype=torch.bool),
    )
    settings = changed(PLAIN, importance_level=level, correction=correction, beta=0.1)
    for proximal in (None, batch.proximal):
        output, gradient = evaluate(settings, batch, proximal=proximal)
        assert all(value.isfinite() for value in vars(output).values())
        assert gradient.isfinite().all()


def test_an_all_masked_batch_is_zero(batch: Batch) -> None:
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        empty = replace(batch, mask=torch.zeros_like(batch.mask))
        output, gradient = evaluate(changed(PLAIN, loss_type=loss_type, beta=0.1), empty)
        assert output.loss == 0
        assert not gradient.any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_type": "cispo", "dual_clip": 2.0}, "dual_clip=2.0 cannot be combined with loss_type=cispo"),
        ({"correction_band": [2.0, 1.0]}, r"correction_band=\[2.0, 1.0\]: the first must be below the second"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**values)
