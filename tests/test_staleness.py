"""Staleness: the estimator against closed forms, the scheduler, the laws of the weight. Rules: test_rules.py."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlaprl_ray.algorithm.kl import staleness_kl
from overlaprl_ray.algorithm.rules import kl_weight
from overlaprl_ray.algorithm.staleness import StalenessDecision, StalenessScheduler
from overlaprl_ray.config import StalenessConfig
from overlaprl_ray.errors import RunError

# ------------------------------------------------------------------------------------------------- against closed forms


class Bigrams:
    """Two policies over `tokens` + 1 symbols, the last being the end; the next symbol depends on the one before."""

    def __init__(self, distance: float, tokens: int = 5, longest: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.end, self.longest = tokens, longest
        logits, direction = torch.randn(2, tokens, tokens + 1, dtype=torch.float64, generator=generator)
        self.mu = logits.log_softmax(-1)
        low, high = 0.0, 10.0  # the step along `direction` that lies `distance` nats per token away, by bisection
        for _ in range(60):
            middle = (low + high) / 2
            self.pi = (logits + middle * direction).log_softmax(-1)
            low, high = (middle, high) if self.exact_kl() < distance else (low, middle)

    def exact_kl(self) -> float:
        """Expected sum of KL(μ(·|s) || π(·|s)) over the states of a sequence / its expected length, summed exactly."""
        by_state = (self.mu.exp() * (self.mu - self.pi)).sum(-1)
        alive = torch.zeros(self.end, dtype=torch.float64)
        alive[0] = 1.0
        total = length = 0.0
        for _ in range(self.longest):
            total, length = total + float(alive @ by_state), length + float(alive.sum())
            alive = alive @ self.mu.exp()[:, : self.end]
        return total / length

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """log μ, log π and the mask of `count` sequences from μ, the end included and nan after it."""
        generator = torch.Generator().manual_seed(1)
        state = torch.zeros(count, dtype=torch.long)
        mu, pi = torch.full((2, count, self.longest), math.nan, dtype=torch.float64)
        mask = torch.zeros(count, self.longest, dtype=torch.bool)
        for t in range(self.longest):
            alive = (state != self.end).nonzero()[:, 0]
            before = state[alive]
            after = torch.multinomial(self.mu[before].exp(), 1, generator=generator)[:, 0]
            mask[alive, t] = True
            mu[alive, t], pi[alive, t] = self.mu[before, after], self.pi[before, after]
            state[alive] = after
        return mu, pi, mask


@pytest.mark.parametrize("distance", [1e-4, 1e-3, 1e-2, 1e-1, 1.0])
def test_estimates_the_exact_kl_of_two_policies(distance: float) -> None:
    policies = Bigrams(distance)
    exact = policies.exact_kl()
    assert exact == pytest.approx(distance, rel=1e-6)
    mu, pi, mask = policies.sample(20_000)
    estimate, capped = (
        StalenessScheduler(StalenessConfig(kl_token_cap=cap)).measure_staleness(mu, pi, mask) for cap in (None, 1.0)
    )
    length = mask.sum(1)
    residual = staleness_kl(pi - mu, mask, dim=1) * length - exact * length
    standard_error = residual.std().item() / (math.sqrt(len(mask)) * length.double().mean().item())
    assert standard_error < 0.05 * exact
    assert abs(estimate - exact) < 3 * standard_error
    assert 0 < capped <= estimate  # a bound from below, tight where no token has gone far
    assert distance > 0.01 or capped > 0.95 * estimate


@pytest.mark.parametrize("distance", [1e-3, 1e-1])
def test_the_direction_is_that_of_the_generating_policy(distance: float) -> None:
    """k3 of the inverse ratio has another mean: r is π/μ under samples of μ."""
    policies = Bigrams(distance)
    mu, pi, mask = policies.sample(20_000)
    swapped = float(staleness_kl(mu - pi, mask))
    estimate = float(staleness_kl(pi - mu, mask))
    assert abs(swapped - distance) > 2 * abs(estimate - distance)


# -------------------------------------------------------------------------------------------------- the scheduler's own


@pytest.fixture
def scheduler() -> StalenessScheduler:
    return StalenessScheduler(StalenessConfig(kl_fresh=0.05, kl_stale=0.15, min_weight=0.1))


def test_measures_lists_and_tensors_of_one_and_two_dimensions(scheduler: StalenessScheduler) -> None:
    then, now = [-1.0, -2.0, -0.5], [-1.4, -1.7, -0.5]
    expected = sum(math.exp(b - a) - 1 - (b - a) for a, b in zip(then, now, strict=True)) / 3
    assert scheduler.measure_staleness(then, now) == pytest.approx(expected, rel=1e-10)
    assert scheduler.measure_staleness(
        torch.tensor(then, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    ) == pytest.approx(expected, rel=1e-10)
    assert scheduler.measure_staleness([then, then], [now, now]) == pytest.approx(expected, rel=1e-10)
    assert scheduler.measure_staleness([*then, math.nan], [*now, -math.inf], [1, 1, 1, 0]) == pytest.approx(
        expected, rel=1e-10
    )
    assert isinstance(scheduler.measure_staleness(then, torch.tensor(now, requires_grad=True)), float)


def test_measures_ragged_rows_per_token(scheduler: StalenessScheduler) -> None:
    now = torch.tensor([[0.3, 0.3, 0.3], [-0.2, math.nan, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = (3 * (math.exp(0.3) - 1.3) + (math.exp(-0.2) - 0.8)) / 4
    assert scheduler.measure_staleness(torch.zeros(2, 3), now, mask) == pytest.approx(expected, rel=1e-10)


def test_measures_zero_where_nothing_counts(scheduler: StalenessScheduler) -> None:
    assert scheduler.measure_staleness([-1.0], [-9.0], [0]) == 0.0
    assert scheduler.measure_staleness([], []) == 0.0


@pytest.mark.parametrize("far", [1e4, -1e4, math.inf, -math.inf])
def test_far_policies_are_discarded_not_nan(scheduler: StalenessScheduler, far: float) -> None:
    kl = scheduler.measure_staleness(torch.zeros(2, 3), torch.full((2, 3), far))
    assert math.isfinite(kl)
    assert scheduler.decide(kl).decision == "discard"


@pytest.mark.parametrize("then", [[0.0] * 31, [[0.0] * 32]])
def test_shapes_must_agree(scheduler: StalenessScheduler, then: Any) -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        scheduler.measure_staleness(then, [0.0] * 32)
    with pytest.raises(ValueError, match="shapes differ"):
        scheduler.measure_staleness([0.0] * 32, [0.0] * 32, [1] * 31)


@pytest.mark.parametrize(
    ("kl", "weight", "decision"),
    [
        (0.0, 1.0, "fresh"),
        (math.nextafter(0.05, 0), 1.0, "fresh"),
        (0.05, 1.0, "stale"),
        (0.10, 0.55, "stale"),
        (0.125, 0.325, "stale"),
        (math.nextafter(0.15, 0), 0.1, "stale"),
        (0.15, 0.0, "discard"),
        (math.inf, 0.0, "discard"),
    ],
)
def test_decides(scheduler: StalenessScheduler, kl: float, weight: float, decision: str) -> None:
    decided = scheduler.decide(kl, num_samples=7)
    assert decided == StalenessDecision(kl, pytest.approx(weight, rel=1e-12), decision, 7)  # type: ignore[arg-type]
    assert decided.weight == 1.0 or decision != "fresh"


def test_summary_counts_decisions(scheduler: StalenessScheduler) -> None:
    assert scheduler.summary()["decisions"] == 0
    for kl in (0.01, 0.02, 0.1, 0.2):
        scheduler.decide(kl)
    scheduler.record("discard", 0.0, kl=None)
    assert scheduler.summary() == {
        "decisions": 5,
        "fresh": 2,
        "stale": 1,
        "discard": 2,
        "frac_fresh": 0.4,
        "frac_stale": 0.2,
        "frac_discard": 0.4,
        "mean_kl": pytest.approx(0.33 / 4),
        "mean_weight": pytest.approx(2.55 / 5),
    }


def test_nan_is_an_error_not_a_decision(scheduler: StalenessScheduler) -> None:
    with pytest.raises(RunError, match="nan"):
        scheduler.decide(math.nan)


def test_a_token_counts_for_at_most_the_cap() -> None:
    """From 1e-5 to .2 one token adds k3 = 19989 nats, 9.8 to the mean of 2,048: enough to discard any batch alone."""
    then = torch.full((2048,), -1.0, dtype=torch.float64)
    now = then + 0.01
    then[7], now[7] = math.log(1e-5), math.log(0.2)
    rest = 2047 * (math.exp(0.01) - 1.01)
    for cap, adds in {None: 2e4 - 1 - math.log(2e4), 1.0: 1.0, 0.1: 0.1}.items():
        kl = StalenessScheduler(StalenessConfig(kl_token_cap=cap)).measure_staleness(then, now)
        assert kl == pytest.approx((rest + adds) / 2048, rel=1e-9)


def test_thresholds_in_multiples_of_the_floor() -> None:
    scheduler = StalenessScheduler(StalenessConfig(kl_fresh=10, kl_stale=30, threshold_unit="floor"))
    with pytest.raises(ValueError, match="calibrate"):
        scheduler.decide(0.0)
    scheduler.calibrate(1e-4)
    assert [scheduler.decide(kl).decision for kl in (0.9e-3, 1.1e-3, 3.1e-3)] == ["fresh", "stale", "discard"]


@pytest.mark.parametrize("settings", [{"kl_fresh": 1e-6, "kl_stale": 1e-4}, {"threshold_unit": "floor", "kl_stale": 1}])
def test_thresholds_at_or_below_the_floor_are_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="kl_stale"):
        StalenessScheduler(StalenessConfig(**settings)).calibrate(1e-4)


# --------------------------------------------------------------------------------------------------- laws of the weight

thresholds = (
    st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)).map(lambda t: (min(t), max(t))).filter(lambda t: t[0] < t[1])
)
fractions = st.floats(0, 1)


@settings(deadline=None)
@given(thresholds, fractions)
def test_the_boundaries_are_exact(limits: tuple[float, float], min_weight: float) -> None:
    kl_fresh, kl_stale = limits
    assert kl_weight(kl_fresh, kl_fresh, kl_stale, min_weight) == 1.0
    assert kl_weight(kl_stale, kl_fresh, kl_stale, min_weight) == 0.0
    assert kl_weight(math.nextafter(kl_fresh, 0), kl_fresh, kl_stale, min_weight) == 1.0
    assert kl_weight(math.nextafter(kl_stale, 0), kl_fresh, kl_stale, min_weight) >= min_weight
    config = StalenessConfig(kl_fresh=kl_fresh, kl_stale=kl_stale, min_weight=min_weight)
    decide = StalenessScheduler(config).decide
    assert (decide(kl_fresh).decision, decide(kl_stale).decision) == ("stale", "discard")


def test_rounding_does_not_undercut_min_weight() -> None:
    """Just below kl_stale the progress towards it rounds to 1 here, and 1 - (1 - 0.1) * 1 to a number below 0.1."""
    kl_fresh, kl_stale = 2.0**-53, 1 + 3 * 2.0**-52
    assert kl_weight(math.nextafter(kl_stale, 0), kl_fresh, kl_stale, 0.1) == 0.1


@settings(deadline=None)
@given(thresholds, fractions, st.floats(0, 2), st.floats(0, 2))
def test_the_weight_only_falls_and_stays_in_its_range(
    limits: tuple[float, float], min_weight: float, a: float, b: float
) -> None:
    near, far = (kl_weight(kl, *limits, min_weight) for kl in sorted((a, b)))
    assert 1 >= near >= far >= 0
    assert far == 0 or far >= min_weight


@settings(deadline=None)
@given(thresholds, fractions, st.floats(0, 1))
def test_the_weight_is_continuous_at_kl_fresh(limits: tuple[float, float], min_weight: float, step: float) -> None:
    kl_fresh, kl_stale = limits
    kl = kl_fresh + step * (kl_stale - kl_fresh)
    assume(kl < kl_stale)
    assert 1 - kl_weight(kl, *limits, min_weight) <= (1 - min_weight) * (kl - kl_fresh) / (kl_stale - kl_fresh) + 1e-9


@settings(deadline=None)
@given(thresholds, fractions, st.floats(0, 2), st.integers(-20, 20))
def test_the_weight_does_not_depend_on_the_unit(
    limits: tuple[float, float], min_weight: float, kl: float, power: int
) -> None:
    unit = 2.0**power  # exact in binary, so that the boundaries stay where they are
    scaled = kl_weight(kl * unit, limits[0] * unit, limits[1] * unit, min_weight)
    assert scaled == pytest.approx(kl_weight(kl, *limits, min_weight), rel=1e-9)


@settings(deadline=None)
@given(thresholds, fractions, st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_tensors_and_floats_get_the_same_weight(
    limits: tuple[float, float], min_weight: float, kls: list[float]
) -> None:
    together = kl_weight(torch.tensor(kls, dtype=torch.float64), *limits, min_weight)
    assert together.tolist() == [kl_weight(kl, *limits, min_weight) for kl in kls]
