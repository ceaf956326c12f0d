"""KL estimators against their formulae, exact expectations, and the edges of floating point."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaprl_ray.algorithm.kl import (
    effective_sample_size,
    k1,
    k2,
    k3,
    masked_mean,
    reference_penalty,
    staleness_kl,
)

LOG_RATIOS = torch.tensor([-19.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.7, 4.0, 19.0], dtype=torch.float64)


def float64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [(k1, lambda x: -x), (k2, lambda x: x * x / 2), (k3, lambda x: math.exp(x) - 1 - x)],
)
def test_equals_the_formula(estimator: Any, formula: Any) -> None:
    expected = float64([formula(x) for x in LOG_RATIOS.tolist()])
    torch.testing.assert_close(estimator(LOG_RATIOS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator: Any) -> None:
    """The expectation over x ~ p, summed exactly over all x, is KL(p || q)."""
    log_p, log_q = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close((log_p.exp() * estimator(log_q - log_p)).sum(), exact, rtol=1e-10, atol=1e-10)


def test_k2_has_the_gradient_of_the_reference_kl() -> None:
    """Σ_x π(x) ∇k2 = ∇KL(π || π_ref) exactly; that of a bare k3 is another one (the gradient of KL(π_ref || π)).

    The penalty with its ratio π/μ, and tokens of another policy: test_off_policy.py.
    """
    logits, reference = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).unbind()
    logits.requires_grad_()
    log_pi, log_ref = logits.log_softmax(-1), reference.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_pi.exp() * (log_pi - log_ref)).sum(), logits, retain_graph=True)

    def expected_gradient(kind: Any) -> torch.Tensor:
        on_policy = (log_pi.detach().exp() * reference_penalty(log_pi, log_ref, kind)).sum()
        return torch.autograd.grad(on_policy, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient("k2"), exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(expected_gradient("straight_through"), exact, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(expected_gradient("k3"), exact, rtol=0.1)


def test_straight_through_has_the_value_of_k3() -> None:
    logprobs, reference = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    value, straight_through = (reference_penalty(logprobs, reference, kind) for kind in ("k3", "straight_through"))
    torch.testing.assert_close(straight_through, value, rtol=1e-10, atol=1e-10)


def test_an_unknown_penalty_is_an_error() -> None:
    with pytest.raises(ValueError, match="kl_penalty"):
        reference_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("magnitude", [1e-7, -1e-7, 1e-6, -1e-5, 1e-4, 1e-3, -1e-2])
def test_k3_is_accurate_at_small_ratios_in_float32(magnitude: float) -> None:
    log_r = torch.tensor(magnitude, dtype=torch.float32)
    x = log_r.item()
    series = math.fsum(x**n / math.factorial(n) for n in range(2, 9))
    assert k3(log_r).dtype == torch.float32
    assert k3(log_r).item() == pytest.approx(series, rel=1e-6, abs=0)


@settings(deadline=None)
@given(st.floats(-1e4, 1e4))
def test_k3_is_finite_and_never_negative(log_r: float) -> None:
    value = k3(torch.tensor(log_r, dtype=torch.float64)).item()
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.parametrize("estimator", [k1, k2, k3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_r", [1e4, -1e4, math.inf, -math.inf])
def test_far_ratios_stay_finite(estimator: Any, dtype: torch.dtype, log_r: float) -> None:
    far = torch.tensor(log_r, dtype=dtype, requires_grad=True)
    value = estimator(far)
    (gradient,) = torch.autograd.grad(value, far)
    assert value.isfinite()
    assert gradient.isfinite()
    assert value == estimator(torch.tensor(math.copysign(20.0, log_r), dtype=dtype))


def test_masked_mean() -> None:
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, -math.inf], [math.nan] * 3], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 5.0, 0.0]
    mean = masked_mean(values, mask)
    assert mean.item() == 3.0
    (gradient,) = torch.autograd.grad(mean, values)
    torch.testing.assert_close(gradient, mask / 3)


def test_staleness_kl_is_the_mean_per_token_whatever_the_lengths() -> None:
    log_ratio = float64([[0.1, -0.2, 9.0], [0.3, math.nan, math.inf], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    tokens = {x: math.exp(x) - 1 - x for x in (0.1, -0.2, 0.3)}
    assert staleness_kl(log_ratio, mask).item() == pytest.approx(sum(tokens.values()) / 3, rel=1e-12)
    by_row = [(tokens[0.1] + tokens[-0.2]) / 2, tokens[0.3], 0.0]
    assert staleness_kl(log_ratio, mask, dim=-1).tolist() == pytest.approx(by_row, rel=1e-12)
    assert staleness_kl(log_ratio, torch.zeros_like(mask)).item() == 0.0


def test_effective_sample_size() -> None:
    log_weight = float64([0.3, -1.2, 0.0, 2.1])
    weight = [math.exp(x) for x in log_weight.tolist()]
    expected = sum(weight) ** 2 / (4 * sum(w * w for w in weight))
    assert effective_sample_size(log_weight) == pytest.approx(expected, rel=1e-12)
    assert effective_sample_size(log_weight + 500) == pytest.approx(expected, rel=1e-12)
    assert effective_sample_size(torch.full((4,), 0.7)) == pytest.approx(1)
    assert effective_sample_size(float64([1e4, -1e4, 0, 0])) == pytest.approx(1 / 4)
    assert effective_sample_size(float64([])) == 1
