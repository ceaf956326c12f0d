"""Staleness: the estimator against closed forms, every rule against a loop, the laws of the weight, the scheduler."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlaprl_ray.algorithm.kl import staleness_kl
from overlaprl_ray.algorithm.rules import (
    DECISIONS,
    RULES,
    Gate,
    GateInputs,
    kl_weight,
    merge_gates,
    overall_decision,
    timing,
)
from overlaprl_ray.algorithm.staleness import StalenessDecision, StalenessScheduler
from overlaprl_ray.config import StalenessConfig
from overlaprl_ray.errors import RunError

GRANULARITIES = ["batch", "group", "sequence"]


def gate_inputs(rows: int = 12, width: int = 7, group_size: int = 3, scale: float = 0.5, seed: int = 0) -> GateInputs:
    """Ragged rows with nan in their padding, drift that grows with the row, and a few rows without signal."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    drift = scale * torch.linspace(0.2, 1.8, rows, dtype=torch.float64)[:, None]
    log_ratio = drift * torch.randn(rows, width, dtype=torch.float64, generator=generator)
    advantages = torch.randn(rows, dtype=torch.float64, generator=generator)
    advantages[torch.arange(rows) % 5 == 2] = 0
    groups = torch.arange(rows) // group_size
    advantages[groups == 1] = 0  # a whole group without signal
    return GateInputs(log_ratio.masked_fill(~mask, math.nan), mask, advantages, groups, lag=2)


def rows_of(inputs: GateInputs, rows: Any) -> GateInputs:
    return GateInputs(
        inputs.log_ratio[rows], inputs.mask[rows], inputs.advantages[rows], inputs.groups[rows], inputs.lag
    )


def judge(inputs: GateInputs, **settings: Any) -> Gate:
    return StalenessScheduler(StalenessConfig(**settings)).judge(inputs)


def names(gate: Gate) -> list[str]:
    return [DECISIONS[row] for row in gate.decision.tolist()]


def tokens_of(inputs: GateInputs, row: int) -> list[float]:
    return [d for d, m in zip(inputs.log_ratio[row].tolist(), inputs.mask[row].tolist(), strict=True) if m]


def naive_weight(kl: float, kl_fresh: float, kl_stale: float, min_weight: float) -> tuple[float, str]:
    if kl < kl_fresh:
        return 1.0, "fresh"
    if kl >= kl_stale:
        return 0.0, "discard"
    return 1 - (1 - min_weight) * (kl - kl_fresh) / (kl_stale - kl_fresh), "stale"


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
    estimate = StalenessScheduler(StalenessConfig()).measure_staleness(mu, pi, mask)
    length = mask.sum(1)
    residual = staleness_kl(pi - mu, mask, dim=1) * length - exact * length
    standard_error = residual.std().item() / (math.sqrt(len(mask)) * length.double().mean().item())
    assert standard_error < 0.05 * exact
    assert abs(estimate - exact) < 3 * standard_error


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


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_is_an_error_not_a_decision(scheduler: StalenessScheduler, granularity: Any) -> None:
    with pytest.raises(RunError, match="nan"):
        scheduler.decide(math.nan)
    inputs = gate_inputs()
    row = int((inputs.mask.any(1) & (inputs.advantages != 0)).nonzero()[0])
    inputs.log_ratio[row, 0] = math.nan
    with pytest.raises(RunError, match="nan"):
        judge(inputs, granularity=granularity)


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


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_boundaries_hold_in_the_gate(granularity: str, seed: int) -> None:
    """A unit whose KL is exactly kl_fresh is stale with weight exactly 1; exactly kl_stale, discarded."""
    inputs = gate_inputs(rows=1 if granularity == "sequence" else 3, seed=seed)
    kl = judge(inputs, rule="none").kl or 0.0
    assume(kl)
    at_fresh = judge(inputs, granularity=granularity, kl_fresh=kl, kl_stale=kl * 3)
    at_stale = judge(inputs, granularity=granularity, kl_fresh=kl / 3, kl_stale=kl)
    for gate, weight, decision in ((at_fresh, 1.0, "stale"), (at_stale, 0.0, "discard")):
        assert gate.weight.tolist() == [weight] * len(inputs.mask)
        assert gate.verdict == decision


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(deadline=None)
@given(seed=st.integers(0, 10_000), padding=st.integers(1, 5))
def test_neither_order_nor_padding_matters(granularity: str, seed: int, padding: int) -> None:
    inputs = gate_inputs(seed=seed)
    gate = judge(inputs, granularity=granularity)
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(seed))
    shuffled = judge(rows_of(inputs, order), granularity=granularity)
    torch.testing.assert_close(shuffled.weight, gate.weight[order], rtol=1e-9, atol=1e-9)
    wider = GateInputs(
        torch.nn.functional.pad(inputs.log_ratio, (0, padding), value=math.inf),
        torch.nn.functional.pad(inputs.mask, (0, padding), value=False),
        inputs.advantages,
        inputs.groups,
        inputs.lag,
    )
    padded = judge(wider, granularity=granularity)
    torch.testing.assert_close(padded.weight, gate.weight, rtol=1e-9, atol=1e-9)
    assert padded.kl == pytest.approx(gate.kl, rel=1e-9)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.floats(1, 10))
def test_more_drift_never_raises_a_weight(granularity: str, seed: int, factor: float) -> None:
    near, far = (gate_inputs(seed=seed, scale=scale) for scale in (0.2, 0.2 * factor))
    near_gate, far_gate = (judge(inputs, granularity=granularity) for inputs in (near, far))
    assert (far_gate.weight <= near_gate.weight + 1e-12).all()


# -------------------------------------------------------------------------------------------- every rule against a loop


def test_rule_none_measures_and_keeps_all() -> None:
    inputs = gate_inputs()
    gate = judge(inputs, rule="none")
    assert gate.weight.tolist() == [1.0] * 12
    assert gate.verdict == "fresh"
    deltas = [d for row in range(12) if inputs.advantages[row] for d in tokens_of(inputs, row)]
    assert gate.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in deltas) / len(deltas), rel=1e-10)
    assert gate.signal_tokens == len(deltas)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale", [0.1, 0.35, 0.5, 2.0])
def test_rule_kl_equals_a_loop(granularity: Any, scale: float) -> None:
    inputs = gate_inputs(scale=scale)
    config = StalenessConfig(granularity=granularity, kl_fresh=0.02, kl_stale=0.2, min_weight=0.25)
    gate = StalenessScheduler(config).judge(inputs)
    for row in range(12):
        peers = {
            "batch": list(range(12)),
            "group": [other for other in range(12) if inputs.groups[other] == inputs.groups[row]],
            "sequence": [row],
        }[granularity]
        deltas = [d for peer in peers if inputs.advantages[peer] for d in tokens_of(inputs, peer)]
        kl = sum(math.exp(d) - 1 - d for d in deltas) / len(deltas) if deltas else 0.0
        weight, decision = naive_weight(kl, 0.02, 0.2, 0.25)
        assert gate.weight[row].item() == pytest.approx(weight, rel=1e-10, abs=1e-10)
        assert names(gate)[row] == decision


def test_rule_kl_takes_every_decision_in_that_loop() -> None:
    """So that the comparison above is one of all three branches."""
    config = {"granularity": "sequence", "kl_fresh": 0.02, "kl_stale": 0.2}
    assert set(names(judge(gate_inputs(scale=0.5), **config))) == set(DECISIONS)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_batch_without_signal_is_fresh(granularity: str) -> None:
    inputs = gate_inputs(scale=5.0)
    silent = GateInputs(inputs.log_ratio, inputs.mask, torch.zeros(12), inputs.groups, inputs.lag)
    gate = judge(silent, granularity=granularity, kl_fresh=0.0)
    assert (gate.kl, gate.verdict, gate.weight.tolist()) == (0.0, "fresh", [1.0] * 12)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_all_masked_batch_is_fresh(granularity: str) -> None:
    inputs = gate_inputs(scale=5.0)
    empty = GateInputs(inputs.log_ratio, torch.zeros_like(inputs.mask), inputs.advantages, inputs.groups, inputs.lag)
    for rule in RULES:
        assert judge(empty, rule=rule, granularity=granularity).verdict == "fresh"


def test_groups_are_labels_not_prompts_or_neighbours() -> None:
    """Two groups, one far and one near, interleaved: each is judged on its own rows."""
    drift = torch.tensor([0.01, 2.0, 0.01, 2.0], dtype=torch.float64)
    inputs = GateInputs(
        drift[:, None].expand(4, 3), torch.ones(4, 3, dtype=torch.bool), torch.ones(4), torch.tensor([7, 3, 7, 3]), 1
    )
    assert names(judge(inputs, granularity="group")) == ["fresh", "discard", "fresh", "discard"]


@pytest.mark.parametrize(("lag", "kept"), [(0, True), (3, True), (4, False)])
def test_rule_version_drops_by_lag_alone(lag: int, kept: bool) -> None:
    inputs = gate_inputs()
    unread = torch.full_like(inputs.log_ratio, math.nan)
    gate = judge(GateInputs(unread, inputs.mask, inputs.advantages, inputs.groups, lag), rule="version", max_lag=3)
    assert gate.weight.tolist() == [float(kept)] * 12
    assert gate.verdict == ("fresh" if kept else "discard")
    assert gate.kl is None


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.3])
def test_rule_opsm_equals_a_loop(delta: float) -> None:
    inputs = gate_inputs(rows=40, scale=1.0)
    gate = judge(inputs, rule="opsm", opsm_delta=delta)
    for row in range(40):
        deltas = tokens_of(inputs, row)
        drift = -sum(deltas) / len(deltas) if deltas else 0.0
        dropped = inputs.advantages[row] < 0 and drift > delta
        assert gate.weight[row].item() == (0.0 if dropped else 1.0)
        assert names(gate)[row] == ("discard" if dropped else "fresh")
    assert gate.verdict == "stale"


def naive_m2po(inputs: GateInputs, tau: float) -> list[list[bool]]:
    """Drop the largest Δ² among the outward tokens, one at a time, until the mean over those left is below τ."""
    outward = []
    for row, t in inputs.mask.nonzero().tolist():
        delta, advantage = inputs.log_ratio[row, t].item(), inputs.advantages[row].item()
        if (advantage > 0 and delta > 0) or (advantage < 0 and delta < 0):
            outward.append((delta**2, row, t))
    keep = [[True] * inputs.mask.shape[1] for _ in inputs.mask]
    left = sorted(outward)  # of equal Δ² the later token is the last, and goes first
    while left and sum(square for square, *_ in left) / len(left) >= tau:
        _, row, t = left.pop()
        keep[row][t] = False
    return keep


@pytest.mark.parametrize("tau", [1e-6, 0.04, 0.3, 100.0])
@pytest.mark.parametrize("scale", [0.1, 0.5, 2.0])
def test_rule_m2po_equals_a_loop(tau: float, scale: float) -> None:
    inputs = gate_inputs(scale=scale)
    gate = judge(inputs, rule="m2po", m2po_tau=tau)
    assert gate.keep is not None
    assert gate.keep.tolist() == naive_m2po(inputs, tau)
    assert gate.weight.tolist() == [1.0] * 12
    for row, decision in enumerate(names(gate)):
        kept = gate.keep[row][inputs.mask[row]]
        assert decision == ("fresh" if kept.all() else "stale" if kept.any() else "discard")


def test_rule_m2po_by_hand() -> None:
    """τ = 0.05. Outward: 0.1 and 0.5 of the good row, -0.3 and -0.3 of the bad one; Δ² .01 .09 .09 .25.

    Means of the rest: .11, then without .25: .0633, then without the later .09: .05, not *below* τ, then .01.
    """
    log_ratio = torch.tensor([[0.1, 0.5, -2.0, 9.0], [-0.3, -0.3, 2.0, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]] * 2)
    inputs = GateInputs(log_ratio, mask, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), 1)
    gate = judge(inputs, rule="m2po", m2po_tau=0.0499)
    assert gate.keep is not None
    assert gate.keep.tolist() == [[True, False, True, True], [False, False, True, True]]
    tie = judge(inputs, rule="m2po", m2po_tau=0.0501)
    assert tie.keep is not None
    assert tie.keep.tolist() == [[True, False, True, True], [True, False, True, True]]


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_no_rule_gives_nan_on_far_policies(rule: str, far: float) -> None:
    inputs = gate_inputs()
    shifted = GateInputs(inputs.log_ratio * far, inputs.mask, inputs.advantages, inputs.groups, inputs.lag)
    for granularity in GRANULARITIES:
        gate = judge(shifted, rule=rule, granularity=granularity)
        assert gate.weight.isfinite().all()
        assert gate.kl is None or math.isfinite(gate.kl)


# --------------------------------------------------------------------------------------------- when, and in what pieces


def test_timing() -> None:
    assert {rule: {timing(rule, granularity) for granularity in GRANULARITIES} for rule in RULES if rule != "kl"} == {
        "none": {"rows"},
        "version": {"before"},
        "opsm": {"rows"},
        "m2po": {"before"},
    }
    assert [timing("kl", granularity) for granularity in GRANULARITIES] == ["after", "rows", "rows"]


@pytest.mark.parametrize(
    ("rule", "granularity"), [("none", "batch"), ("opsm", "batch"), ("kl", "group"), ("kl", "sequence")]
)
def test_rules_timed_by_rows_do_not_depend_on_the_micro_batches(rule: str, granularity: str) -> None:
    assert timing(rule, granularity) == "rows"
    inputs = gate_inputs(scale=0.5)
    whole = judge(inputs, rule=rule, granularity=granularity)
    parts = merge_gates(
        [judge(rows_of(inputs, part), rule=rule, granularity=granularity) for part in torch.arange(12).split(6)]
    )
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(parts.decision, whole.decision)
    assert parts.kl == pytest.approx(whole.kl, rel=1e-12)
    assert parts.signal_tokens == whole.signal_tokens


def test_fractions_and_verdicts() -> None:
    gate = Gate(weight=torch.ones(4), decision=torch.tensor([0, 0, 1, 2], dtype=torch.int8))
    assert gate.fractions == {"fresh": 0.5, "stale": 0.25, "discard": 0.25}
    assert gate.verdict == "stale"
    assert overall_decision([]) == "fresh"
    assert overall_decision(["fresh", "fresh"]) == "fresh"
    assert overall_decision(["discard", "discard"]) == "discard"
    assert overall_decision(["fresh", "discard"]) == "stale"


# --------------------------------------------------------------------------------- what a weight on a batch really does


def influence(gradient_factor: float, lr_factor: float) -> float:
    """How far one batch's gradient moves a parameter in the end, AdamW with its default betas.

    The other batches pull with ±1 in turn, so the second moment is 1 and the first hovers about 0. The difference
    between two runs with and without that batch's gradient isolates what it did, at once and through momentum later.
    """
    ends = []
    for gradient in (gradient_factor, 0.0):
        parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0)
        optimizer.state[parameter] = {
            "step": torch.tensor(1e6),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.ones_like(parameter),
        }
        for step in range(200):
            judged = step == 20
            parameter.grad = torch.tensor(gradient if judged else (-1.0) ** step, dtype=torch.float64)
            optimizer.param_groups[0]["lr"] = 1e-3 * (lr_factor if judged else 1.0)
            optimizer.step()
        ends.append(parameter.item())
    return (ends[1] - ends[0]) / 1e-3


def test_a_weight_on_the_loss_scales_the_influence_and_one_on_the_lr_hardly_does() -> None:
    """A gradient g of one batch moves the parameter by lr·g·Σ_k 0.1·0.9^k = lr·g in all, 0.1 of it at its own step.

    w = 0.1 on the loss: 0.1 of that. w = 0.1 on the learning rate of its own step: 0.1·0.1 + the 0.9 which momentum
    delivers in later steps = 0.91.
    """
    assert influence(gradient_factor=1.0, lr_factor=1.0) == pytest.approx(1.0, abs=0.01)
    assert influence(gradient_factor=0.1, lr_factor=1.0) == pytest.approx(0.10, abs=0.01)
    assert influence(gradient_factor=1.0, lr_factor=0.1) == pytest.approx(0.91, abs=0.01)


def test_a_weight_common_to_all_batches_cancels_in_adamw() -> None:
    def end(factor: float) -> float:
        parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.0, eps=1e-12)
        for step in range(50):
            parameter.grad = torch.tensor(factor * math.sin(step + 1), dtype=torch.float64)
            optimizer.step()
        return parameter.item()

    assert end(0.1) == pytest.approx(end(1.0), rel=1e-9)
