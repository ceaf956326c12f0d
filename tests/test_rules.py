"""Every staleness rule against a loop over tokens, the laws of the gate, and when and in what pieces it is asked."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlaprl_ray.algorithm.rules import (
    DECISIONS,
    ESS_FRESH,
    RULES,
    Gate,
    GateInputs,
    merge_gates,
    overall_decision,
    timing,
)
from overlaprl_ray.algorithm.staleness import StalenessScheduler
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
    fields = ("log_ratio", "mask", "advantages", "groups")
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in fields})


def judge(inputs: GateInputs, **settings: Any) -> Gate:
    return StalenessScheduler(StalenessConfig(**settings)).judge(inputs)


def settings_of(rule: str) -> list[dict[str, Any]]:
    """The rule at every granularity, where it has one."""
    if rule == "ess":
        return [{"rule": rule, "apply_to": "lr"}]
    return [{"rule": rule, "granularity": granularity} for granularity in GRANULARITIES]


def names(gate: Gate) -> list[str]:
    return [DECISIONS[row] for row in gate.decision.tolist()]


def tokens_of(inputs: GateInputs, row: int) -> list[float]:
    return [d for d, m in zip(inputs.log_ratio[row].tolist(), inputs.mask[row].tolist(), strict=True) if m]


def naive_kl(inputs: GateInputs, rows: list[int], cap: float = math.inf) -> float:
    deltas = [d for row in rows for d in tokens_of(inputs, row)]
    return sum(min(cap, math.exp(d) - 1 - d) for d in deltas) / len(deltas) if deltas else 0.0


def naive_weight(kl: float, kl_fresh: float, kl_stale: float, min_weight: float) -> tuple[float, str]:
    if kl < kl_fresh:
        return 1.0, "fresh"
    if kl >= kl_stale:
        return 0.0, "discard"
    return 1 - (1 - min_weight) * (kl - kl_fresh) / (kl_stale - kl_fresh), "stale"


# ---------------------------------------------------------------------------------------------------- against a loop


def test_rule_none_measures_and_keeps_all() -> None:
    inputs = gate_inputs()
    gate = judge(inputs, rule="none")
    assert gate.weight.tolist() == [1.0] * 12
    assert gate.verdict == "fresh"
    assert gate.kl == pytest.approx(naive_kl(inputs, list(range(12)), cap=1.0), rel=1e-10)
    assert gate.kl_tokens == inputs.mask.sum()
    assert gate.kl_max == pytest.approx(max(math.exp(d) - 1 - d for row in range(12) for d in tokens_of(inputs, row)))
    assert gate.kl_max > 1.0  # beyond the cap: it says what the cap took away


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("scale", "cap"), [(0.1, None), (0.35, 1.0), (0.5, None), (0.5, 0.05), (2.0, 1.0)])
def test_rule_kl_equals_a_loop(granularity: Any, scale: float, cap: float | None) -> None:
    inputs = gate_inputs(scale=scale)
    shape = {"granularity": granularity, "kl_token_cap": cap}
    config = StalenessConfig(kl_fresh=0.02, kl_stale=0.2, min_weight=0.25, **shape)
    gate = StalenessScheduler(config).judge(inputs)
    for row in range(12):
        peers = {
            "batch": list(range(12)),
            "group": [other for other in range(12) if inputs.groups[other] == inputs.groups[row]],
            "sequence": [row],
        }[granularity]
        kl = naive_kl(inputs, peers, cap=math.inf if cap is None else cap)
        weight, decision = naive_weight(kl, 0.02, 0.2, 0.25)
        assert gate.weight[row].item() == pytest.approx(weight, rel=1e-10, abs=1e-10)
        assert names(gate)[row] == decision


def test_rule_kl_takes_every_decision_in_that_loop() -> None:
    """So that the comparison above is one of all three branches."""
    config = {"granularity": "sequence", "kl_fresh": 0.02, "kl_stale": 0.2}
    assert set(names(judge(gate_inputs(scale=0.5), **config))) == set(DECISIONS)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rule_kl_does_not_look_at_the_outcome(granularity: str) -> None:
    inputs = gate_inputs()
    gate = judge(inputs, granularity=granularity)
    silent = judge(replace(inputs, advantages=torch.zeros(12)), granularity=granularity)
    assert torch.equal(gate.weight, silent.weight)
    assert torch.equal(gate.decision, silent.decision)
    assert gate.kl == silent.kl


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_that_are_not_measured_count_nowhere_and_are_fresh_on_their_own(granularity: str) -> None:
    inputs = gate_inputs(scale=5.0)
    measured = inputs.groups != 0
    unread = inputs.log_ratio.masked_fill(~measured[:, None], math.nan)
    gate = judge(replace(inputs, log_ratio=unread, measured=measured), granularity=granularity)
    alone = judge(rows_of(inputs, measured), granularity=granularity)
    assert torch.equal(gate.weight[measured], alone.weight)
    assert (gate.kl, gate.kl_tokens, gate.kl_max) == (alone.kl, alone.kl_tokens, alone.kl_max)
    assert names(gate)[0] == ("discard" if granularity == "batch" else "fresh")
    nothing = judge(replace(inputs, log_ratio=unread, measured=torch.zeros(12) > 0), granularity=granularity)
    assert (nothing.kl, nothing.verdict, nothing.weight.tolist()) == (None, "fresh", [1.0] * 12)


@pytest.mark.parametrize("rule", list(RULES))
def test_an_all_masked_batch_is_fresh(rule: str) -> None:
    inputs = replace(gate_inputs(scale=5.0), draw=0.5)
    empty = replace(inputs, mask=torch.zeros_like(inputs.mask))
    assert all(judge(empty, **shape).verdict == "fresh" for shape in settings_of(rule))


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
    gate = judge(replace(inputs, log_ratio=unread, lag=lag), rule="version", max_lag=3)
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


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5])
def test_rule_ess_equals_a_loop(scale: float) -> None:
    """√((Σw)² / (B Σw²)), w the product of a row's token ratios; rows that are empty or not measured have none."""
    inputs = replace(gate_inputs(scale=scale), measured=torch.arange(12) != 4)
    gate = judge(inputs, rule="ess", apply_to="lr")
    rows = [row for row in range(12) if row != 4 and tokens_of(inputs, row)]
    weights = [math.prod(math.exp(d) for d in tokens_of(inputs, row)) for row in rows]
    expected = math.sqrt(sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)))
    assert gate.weight.tolist() == pytest.approx([expected] * 12, rel=1e-9)
    assert gate.verdict == ("fresh" if expected >= ESS_FRESH else "stale")
    assert (scale == 0.02) == (gate.verdict == "fresh")


def test_rule_ess_lies_between_one_row_and_all() -> None:
    alike = replace(gate_inputs(), log_ratio=torch.zeros(12, 7), mask=torch.ones(12, 7) > 0)
    assert judge(alike, rule="ess", apply_to="lr").weight.tolist() == [1.0] * 12
    alone = replace(alike, log_ratio=torch.where(torch.arange(12) == 3, 5.0, -5.0)[:, None].expand(12, 7))
    assert judge(alone, rule="ess", apply_to="lr").weight.tolist() == pytest.approx([math.sqrt(1 / 12)] * 12)


@pytest.mark.parametrize(("draw", "kept"), [(0.0, False), (0.2999, False), (0.3, True), (0.99, True)])
def test_rule_random_goes_by_its_draw_alone(draw: float, kept: bool) -> None:
    inputs = gate_inputs()
    unread = torch.full_like(inputs.log_ratio, math.nan)
    gate = judge(replace(inputs, log_ratio=unread, draw=draw), rule="random", discard_probability=0.3)
    assert gate.weight.tolist() == [float(kept)] * 12
    assert gate.verdict == ("fresh" if kept else "discard")
    assert gate.kl is None


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_no_rule_gives_nan_on_far_policies(rule: str, far: float) -> None:
    inputs = gate_inputs()
    shifted = replace(inputs, log_ratio=inputs.log_ratio * far)
    for shape in settings_of(rule):
        gate = judge(shifted, **shape)
        assert gate.weight.isfinite().all()
        assert gate.kl is None or math.isfinite(gate.kl)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_is_an_error_not_a_decision(granularity: Any) -> None:
    inputs = gate_inputs()
    inputs.log_ratio[int(inputs.mask.any(1).nonzero()[0]), 0] = math.nan
    with pytest.raises(RunError, match="nan"):
        judge(inputs, granularity=granularity)


# -------------------------------------------------------------------------------------------------- laws of the gate


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
    wider = replace(
        inputs,
        log_ratio=torch.nn.functional.pad(inputs.log_ratio, (0, padding), value=math.inf),
        mask=torch.nn.functional.pad(inputs.mask, (0, padding), value=False),
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


# --------------------------------------------------------------------------------------------- when, and in what pieces


def test_timing() -> None:
    assert {rule: {timing(rule, granularity) for granularity in GRANULARITIES} for rule in RULES if rule != "kl"} == {
        "none": {"rows"},
        "version": {"before"},
        "opsm": {"rows"},
        "m2po": {"before"},
        "ess": {"after"},
        "random": {"before"},
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
    assert (parts.kl_tokens, parts.kl_max) == (whole.kl_tokens, whole.kl_max)


def test_fractions_and_verdicts() -> None:
    gate = Gate(weight=torch.ones(4), decision=torch.tensor([0, 0, 1, 2], dtype=torch.int8))
    assert gate.fractions == {"fresh": 0.5, "stale": 0.25, "discard": 0.25}
    assert gate.verdict == "stale"
    assert overall_decision([]) == "fresh"
    assert overall_decision(["fresh", "fresh"]) == "fresh"
    assert overall_decision(["discard", "discard"]) == "discard"
    assert overall_decision(["fresh", "discard"]) == "stale"
