"""An update as a whole: its weight survives clipping at every granularity, and without a loss term there is none."""

import copy
import dataclasses
import math

import pytest
import torch
from conftest import make_rollout, small
from transformers import AutoModelForCausalLM

from overlaprl_ray.config import ExperimentConfig, TinyConfig
from overlaprl_ray.engines.hf import HFEngine
from overlaprl_ray.models.logprobs import response_logprobs
from overlaprl_ray.models.tiny import tiny_config
from overlaprl_ray.rollout import Rollout, Scores
from overlaprl_ray.workers.learner import Learner

PROMPTS = [[5 + i, 6, 7 + i][: 1 + i % 3] for i in range(8) for _ in range(2)]  # 8 groups of 2, ragged
GRANULARITIES = ["batch", "group", "sequence"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(TinyConfig())).eval()


@pytest.fixture(scope="module")
def rollout(model) -> Rollout:
    """Made by the model itself, with logprobs as the learner computes them: drift is what a test adds."""
    out = HFEngine(model, pad_id=0, eos_ids=(1,)).generate(PROMPTS, 6, 1.0, [(0, 1, row) for row in range(16)])
    advantages = torch.randn(16, generator=torch.Generator().manual_seed(0))
    made = make_rollout(PROMPTS, out, advantages=advantages, groups=torch.arange(16) // 2)
    with torch.no_grad():
        return dataclasses.replace(made, logprobs=response_logprobs(model, made, 1.0)[0])


def older(rollout: Rollout, log_ratio: torch.Tensor | float, **fields) -> Rollout:
    """The same tokens, made by a policy from which the present one is `log_ratio` (a number, or (16, 1)) away."""
    logprobs = torch.where(rollout.completion_mask, rollout.logprobs - log_ratio, 0.0)
    return dataclasses.replace(rollout, logprobs=logprobs, **fields)


def config_of(staleness, **grpo) -> ExperimentConfig:
    base = {"num_prompts_per_step": 8, "group_size": 2, "max_new_tokens": 6, "beta": 0.0, "micro_batch_size": 4}
    return small(grpo={**base, "clip_eps": None, **grpo}, pipeline={"mode": "staleness", "lag": 4}, staleness=staleness)


def learner_of(model, config) -> Learner:
    learner = Learner(config, copy.deepcopy(model))
    learner.floor = 0.0
    return learner


def scores_of(rollout, config):
    return Scores(rollout.logprobs - 0.3, (0.0, 1.0), 0.0) if config.grpo.beta else None


def moved(model, learner) -> torch.Tensor:
    pairs = zip(learner.model.parameters(), model.parameters(), strict=True)
    return torch.cat([(now - before).detach().flatten() for now, before in pairs])


def first_moment(learner) -> torch.Tensor:
    return torch.cat([state["exp_avg"].flatten() for state in learner.optimizer.adamw.state.values()])


def graded(weight: float, log_ratio: float, **staleness):
    """Rule kl with thresholds that give this weight to whatever has drifted so far."""
    kl = math.expm1(log_ratio) - log_ratio
    return {"rule": "kl", "kl_fresh": 0, "kl_stale": kl / (1 - weight), "min_weight": 0, **staleness}


# ---- weights and clipping


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("clipping", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize("apply_to", ["update", "loss"])
@pytest.mark.parametrize("granularity", ["group", "sequence"])
def test_equal_weights_of_all_rows_are_the_batchs_weight(model, rollout, granularity, apply_to, clipping, beta):
    """Rows without signal at beta 0 have no loss term: though fresh, they are no part of the mean weight."""
    advantages = torch.where(torch.arange(16) < 4, 0.0, rollout.advantages)
    drifted = older(rollout, 0.5, advantages=advantages)
    found = []
    for judged in ("batch", granularity):
        staleness = graded(0.28, 0.5, granularity=judged, apply_to=apply_to)
        shape = {"max_grad_norm": 0.05 if clipping else 50.0, "beta": beta, "adam_eps": 1e-3}
        learner = learner_of(model, config_of(staleness, **shape))
        metrics = learner.step(drifted, scores_of(drifted, learner.config)).metrics
        assert (metrics["grad_norm"] > learner.config.grpo.max_grad_norm) == clipping
        found.append((moved(model, learner), first_moment(learner), metrics["grad_norm"]))
    (way, moment, norm), (other_way, other_moment, other_norm) = found
    assert float((moment - other_moment).norm()) < 1e-6 * float(moment.norm())
    assert float((way - other_way).norm()) < 2e-5 * float(way.norm())  # float32 parameters round at 1e-5 of it each
    assert other_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("apply_to", ["update", "loss"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_clipping_does_not_undo_a_weight(model, rollout, granularity, apply_to):
    """Norm six times the limit, mean weight .28: the first moment is .1 · .28 of the limit, whatever is judged.

    Clipping the weighted gradient instead would leave .1, as without a weight: .28 of six is above the limit still.
    """
    near = torch.arange(16) // (1 if granularity == "sequence" else 2) % 2
    # a batch has one weight, .28; elsewhere half of the units get .1096 and half, for a log-ratio of .4, .4504
    far, weight = (0.5, 0.28) if granularity == "batch" else (0.5 - 0.1 * near[:, None], 0.1096)
    drifted = older(rollout, far)
    staleness = graded(weight, 0.5, granularity=granularity, apply_to=apply_to)
    norm = learner_of(model, config_of(staleness, max_grad_norm=1e6)).step(drifted).metrics["grad_norm"]
    learner = learner_of(model, config_of(staleness, max_grad_norm=norm / 6))
    metrics = learner.step(drifted).metrics
    assert metrics["staleness/weight"] == pytest.approx(0.28, rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert float(first_moment(learner).norm()) / (norm / 6) == pytest.approx(0.028, rel=1e-3)


# ---- no loss term, no update

KL = {"rule": "kl", "kl_fresh": 1e-3, "kl_stale": 2e-3}
SIGNS = torch.tensor([1.0, -1.0] * 8)


def untouched(model, rollout, drifted, staleness, **grpo):
    """A step of a learner that has moments: its metrics and forwards, once nothing has changed, to the bit."""
    config = config_of(staleness, weight_decay=0.1, lr=1e-2, **grpo)
    past = learner_of(model, config_of({"rule": "none"}, weight_decay=0.1, lr=1e-2, **grpo))
    past.step(rollout, scores_of(rollout, config))
    judged = learner_of(model, config)
    judged.optimizer.adamw.load_state_dict(copy.deepcopy(past.optimizer.adamw.state_dict()))
    judged.version, calls = 1, []
    judged.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    before = judged.state()
    metrics = judged.step(dataclasses.replace(drifted, batch=2), scores_of(drifted, judged.config)).metrics
    after = judged.state()
    assert metrics["version"] == after["version"] == before["version"] == 1
    assert metrics["loss"] is metrics["policy_loss"] is metrics["grad_norm"] is metrics["kl_ref"] is None
    left, right = (state["optimizer"] for state in (before, after))
    assert all(torch.equal(a, b) for a, b in zip(left["masters"], right["masters"], strict=True))
    for index, moments in left["adamw"]["state"].items():
        assert all(torch.equal(right["adamw"]["state"][index][name], value) for name, value in moments.items())
    return metrics, len(calls)


RULES = [
    {"rule": "none"},
    {"rule": "version", "max_lag": 4},
    {"rule": "opsm"},
    {"rule": "m2po"},
    {"rule": "ess", "apply_to": "lr"},
    {"rule": "random", "discard_probability": 0.0},
    *[{**KL, "granularity": granularity} for granularity in GRANULARITIES],
]


@pytest.mark.parametrize("staleness", RULES, ids=lambda rule: f"{rule['rule']}-{rule.get('granularity', '')}")
def test_no_signal_at_beta_0_is_no_update(model, rollout, staleness):
    """Nothing is computed but what rule kl asks for a batch; not even momentum or weight decay moves a weight."""
    silent = older(rollout, 0.01, advantages=torch.zeros(16))
    metrics, forwards = untouched(model, rollout, silent, staleness, num_iterations=2, num_minibatches=2)
    assert forwards == (4 if staleness.get("granularity") == "batch" or staleness["rule"] == "ess" else 0)
    assert metrics["rows_skipped"] == 16
    assert metrics["staleness/decision"] == "fresh"
    assert metrics["entropy"] is metrics["ratio/mean"] is metrics["ess"] is metrics["padding_waste"] is None


@pytest.mark.parametrize(("granularity", "unit"), [("group", 4), ("sequence", 4), ("sequence", 2)])
def test_rows_without_a_loss_term_do_not_make_an_update(model, rollout, granularity, unit):
    """Beta 0: whatever has signal is discarded; the fresh half, groups or one row of each, has none."""
    idle = torch.arange(16) % unit < unit / 2
    far = torch.where(idle, 0.0, 1.0)[:, None]
    drifted = older(rollout, far, advantages=torch.where(idle, 0.0, rollout.advantages))
    metrics, _ = untouched(model, rollout, drifted, {**KL, "granularity": granularity})
    assert metrics["staleness/frac_fresh"] == metrics["staleness/frac_discarded"] == 0.5


@pytest.mark.parametrize("idle", [False, True], ids=["all outward", "some idle"])
@pytest.mark.parametrize("size", [4, None])
def test_m2po_that_drops_every_token_makes_no_update(model, rollout, size, idle):
    """Every token moves away from μ (A and log-ratio of one sign) and is beyond τ; one row of a group may be idle."""
    advantages = torch.where((torch.arange(16) % 4 == 0) & idle, 0.0, SIGNS)
    outward = older(rollout, 0.5 * SIGNS[:, None], advantages=advantages)
    metrics, _ = untouched(model, rollout, outward, {"rule": "m2po", "m2po_tau": 1e-6}, micro_batch_size=size)
    assert metrics["staleness/frac_discarded"] == 1 - (4 / 16 if idle else 0)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    "staleness",
    [
        *[{**KL, "granularity": granularity} for granularity in GRANULARITIES],
        {**KL, "apply_to": "lr"},
        {"rule": "version", "max_lag": 0},
        {"rule": "random", "discard_probability": 1.0},
    ],
    ids=lambda rule: "-".join(map(str, rule.values())),
)
def test_everything_discarded_is_no_update(model, rollout, staleness, beta):
    metrics, _ = untouched(model, rollout, older(rollout, 1.0), staleness, beta=beta)
    assert metrics["staleness/decision"] == "discard"


@pytest.mark.parametrize("staleness", [{"rule": "m2po", "m2po_tau": 1e-6}, {**KL, "granularity": "sequence"}])
def test_the_reference_penalty_alone_makes_an_update(model, rollout, staleness):
    """At beta > 0 every row has a loss term, its tokens dropped or its advantage 0."""
    outward = older(rollout, 0.5 * SIGNS[:, None], advantages=SIGNS)
    silent = older(rollout, 0.0, advantages=torch.zeros(16))
    learner = learner_of(model, config_of(staleness, beta=0.1))
    drifted = outward if staleness["rule"] == "m2po" else silent
    metrics = learner.step(drifted, scores_of(drifted, learner.config)).metrics
    assert (metrics["version"], metrics["kl_ref"] > 0) == (1, True)
    assert moved(model, learner).any()
