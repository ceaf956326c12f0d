"""What is right on-policy only, at lag: the reference penalty and the gate's KL against expectations summed exactly.

`pytest tests/test_off_policy.py -s` prints both tables.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from overlaprl_ray.algorithm.kl import k3, reference_penalty
from overlaprl_ray.algorithm.loss import LossOutput, grpo_loss
from overlaprl_ray.algorithm.rules import GateInputs
from overlaprl_ray.algorithm.staleness import StalenessScheduler
from overlaprl_ray.config import GRPOConfig, StalenessConfig

PENALTIES = ("k3", "straight_through", "k2")

# ------------------------------------------------------------------------------------------------ the reference penalty


@dataclass
class Policy:
    """Two tokens out of `vocabulary`, the second given the first; every sequence is a row."""

    logits: Tensor  # (1 + vocabulary, vocabulary): of the first token, then of the second after each first one
    vocabulary: int = 12

    def by_state(self) -> Tensor:
        return self.logits.log_softmax(-1)

    def logprobs(self) -> Tensor:
        """(vocabulary², 2) of all sequences."""
        states = self.by_state()
        first, second = torch.cartesian_prod(*[torch.arange(self.vocabulary)] * 2).unbind(-1)
        return torch.stack([states[0, first], states[1 + first, second]], dim=1)


@pytest.fixture(params=["on-policy", "off-policy"])
def policies(request: pytest.FixtureRequest) -> tuple[Policy, Policy, Policy]:
    """(π with grad, μ, π_ref): π is π_ref with its logits shifted by 2 · normal noise; μ is π, or is π_ref."""
    generator = torch.Generator().manual_seed(0)
    reference, shift = torch.randn(2, 13, 12, dtype=torch.float64, generator=generator)
    logits = reference + 2 * shift
    behaviour = logits if request.param == "on-policy" else reference
    return Policy(logits.clone().requires_grad_()), Policy(behaviour), Policy(reference)


def exact(pi: Policy, mu: Policy, reference: Policy) -> tuple[Tensor, Tensor]:
    """KL(π || π_ref) of both positions, the second averaged over first tokens from μ; and its gradient."""
    by_state = (pi.by_state().exp() * (pi.by_state() - reference.by_state())).sum(-1)
    kl = by_state[0] + mu.by_state()[0].exp() @ by_state[1:]
    (gradient,) = torch.autograd.grad(kl, pi.logits)
    return kl.detach(), gradient


def expected(per_token: Tensor, pi: Policy, mu: Policy) -> tuple[Tensor, Tensor]:
    """The mean over sequences from μ of the sum over tokens, summed over all sequences; and its gradient."""
    value = mu.logprobs().sum(-1).exp() @ per_token.sum(-1)
    (gradient,) = torch.autograd.grad(value, pi.logits)
    return value.detach(), gradient


def penalty(kind: Any, pi: Policy, mu: Policy, reference: Policy, corrected: bool = True) -> tuple[Tensor, Tensor]:
    behaviour = mu.logprobs() if corrected else None
    return expected(reference_penalty(pi.logprobs(), reference.logprobs(), kind, behaviour), pi, mu)


@pytest.mark.parametrize("kind", PENALTIES)
def test_the_penalty_is_the_kl_and_its_gradient_that_of_the_kl(policies: Any, kind: str) -> None:
    """k2's value is biased by design."""
    kl, kl_gradient = exact(*policies)
    value, gradient = penalty(kind, *policies)
    torch.testing.assert_close(gradient, kl_gradient, rtol=1e-9, atol=1e-9)
    if kind != "k2":
        torch.testing.assert_close(value, kl, rtol=1e-9, atol=1e-9)


def test_without_the_ratio_it_is_wrong_by_orders_of_magnitude(policies: Any) -> None:
    """On-policy the ratio is 1 and only k3 lacks its gradient; off-policy all three fail, k3 worst."""
    on_policy = torch.equal(policies[0].logits, policies[1].logits)
    kl, kl_gradient = exact(*policies)
    print(f"\n{'':26}value  |gradient| / that of the KL\n{'true KL(π || π_ref)':24}{kl:7.2f}{1:10.2f}")
    off = {}
    for kind, corrected in product(PENALTIES, (True, False)):
        value, gradient = penalty(kind, *policies, corrected)
        length = gradient.norm() / kl_gradient.norm()
        off[kind, corrected] = (gradient - kl_gradient).norm() / kl_gradient.norm()
        print(f"{kind + (' · π/μ' if corrected else ''):24}{value:7.2f}{length:10.2f}")
        if (kind, corrected, on_policy) == ("k3", False, False):
            assert value > 40 * kl
            assert length > 100
    wrong = {(kind, False) for kind in PENALTIES if kind == "k3" or not on_policy}
    assert {key for key, distance in off.items() if distance > 0.5} == wrong
    assert all(distance < 1e-9 for key, distance in off.items() if key not in wrong)


def evaluate(settings: GRPOConfig, policies: Any, keep: Tensor | None) -> tuple[LossOutput, Tensor]:
    """The mean loss over rows from μ: all rows, weighted by their chance. Advantages of both signs."""
    pi, mu, reference = policies
    logprobs, behaviour = pi.logprobs(), mu.logprobs()
    output = grpo_loss(
        settings,
        logprobs,
        behaviour,
        advantages_of(behaviour),
        torch.ones_like(behaviour, dtype=torch.bool),
        normalizer=1.0,
        reference=reference.logprobs(),
        row_weight=behaviour.sum(-1).exp(),
        keep=keep,
    )
    (gradient,) = torch.autograd.grad(output.loss, pi.logits)
    return output, gradient


def advantages_of(behaviour: Tensor) -> Tensor:
    return torch.randn(len(behaviour), dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def drops_of_m2po(policies: Any) -> Tensor:
    pi, mu, _ = policies
    behaviour = mu.logprobs()
    log_ratio = pi.logprobs().detach() - behaviour
    groups = torch.arange(len(behaviour)) // 8
    inputs = GateInputs(log_ratio, torch.ones_like(log_ratio) > 0, advantages_of(behaviour), groups, lag=1)
    keep = StalenessScheduler(StalenessConfig(rule="m2po")).judge(inputs).keep
    assert keep is not None
    assert 0.1 < keep.double().mean() < 0.9
    return keep


@pytest.mark.parametrize("policies", ["off-policy"], indirect=True)
@pytest.mark.parametrize("dropping", [False, True], ids=["clip", "m2po"])
@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["none", "truncated", "decoupled"])
def test_in_the_loss_the_penalty_is_never_clipped_capped_or_dropped(
    policies: Any, correction: Any, level: Any, kind: Any, dropping: bool
) -> None:
    """Whatever happens to the policy term, what beta adds is β KL(π || π_ref), in value and gradient."""
    shape = {"correction": correction, "correction_cap": 1.1, "importance_level": level, "kl_penalty": kind}
    plain = GRPOConfig(beta=0.0, clip_eps=0.1, dual_clip=1.5, loss_type="dapo", **shape)
    assert plain.use_bias_correction_kl
    keep = drops_of_m2po(policies) if dropping else None
    without, gradient_without = evaluate(plain, policies, keep)
    penalised, gradient = evaluate(plain.model_copy(update={"beta": 0.5}), policies, keep)
    kl, kl_gradient = exact(*policies)
    torch.testing.assert_close(gradient - gradient_without, 0.5 * kl_gradient, rtol=1e-9, atol=1e-9)
    if kind != "k2":
        torch.testing.assert_close(penalised.loss - without.loss, 0.5 * kl, rtol=1e-9, atol=1e-9)
    assert penalised.policy_loss == without.policy_loss
    if correction == "none" or dropping:  # else π is π_prox, whose ratio is 1
        assert without.clip_low > 0
        assert without.clip_high > 0


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_the_ratio_is_bounded_at_20_nats(kind: Any, far: float) -> None:
    logprobs = torch.full((1, 2), far, dtype=torch.float64, requires_grad=True)
    reference = logprobs.detach() - 0.5
    value = reference_penalty(logprobs, reference, kind, torch.zeros(1, 2).double())
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    plain = reference_penalty(logprobs.detach(), reference, kind)
    torch.testing.assert_close(value, math.exp(math.copysign(20, far)) * plain, rtol=1e-12, atol=0)
    assert gradient.isfinite().all()


# ---------------------------------------------------------------------------------------- the gate's KL and the outcome

GROUP = 8


def log_ratios(success: float, doubled: float) -> Tensor:
    """log π/μ of a right and of a wrong answer."""
    return torch.tensor([doubled / success, (1 - doubled) / (1 - success)], dtype=torch.float64).log()


def expected_kl(success: float, doubled: float, rows: Literal["all", "signal"]) -> float:
    """Mean KL per token that rule `kl` measures, summed over all outcomes of a group of 8 one-token answers.

    μ is right with probability `success`, π with `doubled`. `signal`: only rows whose group has both outcomes count.
    """
    sums = tokens = 0.0
    for right in range(GROUP + 1):
        succeeded = torch.arange(GROUP) < right
        log_ratio = log_ratios(success, doubled)[(~succeeded).long(), None]
        mask, groups = torch.ones(GROUP, 1, dtype=torch.bool), torch.zeros(GROUP, dtype=torch.long)
        advantages = succeeded.double() - succeeded.double().mean()
        measured = None if rows == "all" else advantages != 0
        inputs = GateInputs(log_ratio, mask, advantages, groups, lag=1, measured=measured)
        gate = StalenessScheduler(StalenessConfig(rule="kl", kl_token_cap=None)).judge(inputs)
        chance = math.comb(GROUP, right) * success**right * (1 - success) ** (GROUP - right)
        sums += chance * (gate.kl or 0.0) * gate.kl_tokens
        tokens += chance * gate.kl_tokens
    return sums / tokens


@pytest.mark.parametrize(("success", "factor"), [(0.01, 12.8), (0.05, 2.8), (0.5, 1.0)])
def test_the_gates_kl_is_not_chosen_by_outcome(success: float, factor: float) -> None:
    """Where success is rare, groups with signal are those with a success, whose tokens have drifted most."""
    doubled = min(2 * success, 0.75)
    kl = float(torch.tensor([success, 1 - success], dtype=torch.float64) @ k3(log_ratios(success, doubled)))
    by_outcome = expected_kl(success, doubled, "signal") / kl
    print(f"\nsuccess {success:4.2f}: KL {kl:.5f}; by rows with signal x {by_outcome:.1f}")
    assert expected_kl(success, doubled, "all") == pytest.approx(kl, rel=1e-9)
    assert by_outcome == pytest.approx(factor, rel=0.05)
