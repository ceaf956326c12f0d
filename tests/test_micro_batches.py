"""Micro-batches by a token budget, and groups without signal: the same update from less work."""

import copy
import dataclasses

import pytest
import torch
from conftest import make_rollout, small
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from overlaprl_ray.config import ExperimentConfig, TinyConfig
from overlaprl_ray.config.grpo import GRPOConfig
from overlaprl_ray.engines.hf import Generated, HFEngine
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.tiny import tiny_config
from overlaprl_ray.rollout import Scores
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.workers.learner import Learner
from overlaprl_ray.workers.micro_batches import micro_batches, rows_with_signal
from overlaprl_ray.workers.reference import Reference

PROMPTS = [[5 + i] * (1 + 3 * i % 7) for i in range(8) for _ in range(2)]  # 8 groups of 2, ragged
RULES = [
    {"rule": "none"},
    {"rule": "version", "max_lag": 4},
    {"rule": "opsm", "opsm_delta": 0.01},
    {"rule": "m2po", "m2po_tau": 1e-3},
    *[{"rule": "kl", "kl_fresh": 1e-4, "kl_stale": 0.03, "granularity": g} for g in ("batch", "group", "sequence")],
]
STEP = ("loss", "policy_loss", "grad_norm", "clip_ratio/low", "clip_ratio/high")
JUDGED = tuple(f"staleness/{name}" for name in ("kl", "weight", "frac_fresh", "frac_stale", "frac_discarded"))


def padded_tokens(part):
    return part.prompt_ids.numel() + part.completion_ids.numel()


def real_tokens(part):
    return int(part.prompt_mask.sum()) + int(part.completion_mask.sum())


def config_of(staleness=None, **grpo) -> ExperimentConfig:
    base = {"num_prompts_per_step": 8, "group_size": 2, "max_new_tokens": 6, "beta": 0.0, "max_grad_norm": 0.1}
    pipeline = {"mode": "staleness", "lag": 4}
    return small(grpo={**base, **grpo}, pipeline=pipeline, staleness=staleness or {"kl_fresh": 1, "kl_stale": 2})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(TinyConfig())).eval()


@pytest.fixture(scope="module")
def rollout(model):
    """Ragged rows, drifted by up to a few tenths; advantages of both signs."""
    out = HFEngine(model, pad_id=0, eos_ids=(1,)).generate(PROMPTS, 6, 1.0, [(0, 1, row) for row in range(16)])
    generator = torch.Generator().manual_seed(3)
    keep = torch.randint(1, 7, (16, 1), generator=generator) > torch.arange(out.mask.shape[1])
    mask = out.mask & keep
    logprobs = torch.where(mask, out.logprobs + 0.15 * torch.randn(out.logprobs.shape, generator=generator), 0.0)
    advantages = torch.randn(16, generator=generator)
    made = Generated(out.ids, mask, logprobs, out.finished)
    return make_rollout(PROMPTS, made, advantages=advantages, groups=torch.arange(16) // 2)


def without_signal(rollout, groups):
    advantages = rollout.advantages.clone()
    for group in groups:
        advantages[2 * group : 2 * group + 2] = 0.0
    return dataclasses.replace(rollout, advantages=advantages)


def learner_of(model, config, floor=0.0) -> Learner:
    learner = Learner(config, copy.deepcopy(model))
    learner.floor = floor
    if config.rule == "kl":
        learner.scheduler.calibrate(0.0)
    return learner


def stepped(model, config, rollout, scores=None):
    """(metrics, what the optimizer got, weights, how often the model's body ran)"""
    learner, calls = learner_of(model, config), []
    learner.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    metrics = learner.step(rollout, scores).metrics
    moments = [state["exp_avg"].flatten() for state in learner.optimizer.adamw.state.values()]
    weights = torch.cat([value.flatten() for value in learner.weights().values()]).clone()
    return metrics, torch.cat(moments) if moments else torch.zeros(1), weights, len(calls)


def same(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    return float((left - right).norm()) <= tolerance * float(right.norm())


def assert_close(metrics, oracle, names):
    assert metrics["staleness/decision"] == oracle["staleness/decision"]
    for name in names:
        assert metrics[name] == pytest.approx(oracle[name], rel=1e-4, abs=1e-7), name


# ---- by a token budget ----


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12).map(lambda rows: rows + rows),
    st.integers(18, 120),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_row_once_within_the_budget_and_groups_whole(lengths, budget, by_groups):
    prompts, tokens = [[7] * p for p, _ in lengths], torch.tensor([t for _, t in lengths])
    width = max(1, int(tokens.max()))
    mask = torch.arange(width) < tokens[:, None]
    zeros = torch.zeros(mask.shape)
    rollout = make_rollout(prompts, Generated(zeros.long(), mask, zeros, mask.any(1)))
    rule = {"rule": "kl", "granularity": "group" if by_groups else "sequence"}
    config = config_of(rule, micro_batch_tokens=budget, max_new_tokens=9)
    found = micro_batches(rollout, config.grpo, config.judges_groups)
    assert sorted(row for rows, _ in found for row in rows.tolist()) == list(range(len(lengths)))
    for rows, part in found:
        assert len(part.prompts) == len(rows)
        unit = 2 if by_groups else 1
        assert padded_tokens(part) <= budget or len(rows) == unit
        assert torch.equal(part.completion_mask.sum(1), tokens[rows])
        if by_groups:
            assert all(int((rollout.groups[rows] == group).sum()) == 2 for group in rollout.groups[rows])
    assert sum(real_tokens(part) for _, part in found) == sum(len(p) for p in prompts) + int(tokens.sum())
    longest = int((rollout.prompt_mask.sum(1) + tokens.clamp(min=1)).argmax())
    assert by_groups or longest in found[0][0]  # what needs most memory comes first


@pytest.mark.parametrize(
    "staleness",
    [*RULES, {"rule": "ess", "apply_to": "lr"}],
    ids=lambda rule: f"{rule['rule']}-{rule.get('granularity', '')}",
)
def test_a_token_budget_gives_the_same_update(model, rollout, staleness):
    shape = {"num_iterations": 2, "num_minibatches": 2, "correction": "truncated"}
    whole = stepped(model, config_of(staleness, micro_batch_size=None, **shape), rollout)
    parts = stepped(model, config_of(staleness, micro_batch_tokens=40, **shape), rollout)
    assert parts[3] > whole[3]
    assert same(parts[1], whole[1], 1e-5)
    assert_close(parts[0], whole[0], (*STEP, *JUDGED, "entropy", "ratio/mean", "ess"))


def test_rows_keep_their_own_gate_reference_and_logprobs(model, rollout):
    """With rows sorted, a gate or a reference by place in the micro-batch would be another row's."""
    staleness = {"rule": "kl", "kl_fresh": 0.01, "kl_stale": 0.03, "granularity": "sequence"}
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found = []
    for tokens in (None, 30):
        config = config_of(staleness, beta=0.3, micro_batch_tokens=tokens)
        scores = Reference(config, copy.deepcopy(other)).score(rollout)
        found.append((scores.logprobs, *stepped(model, config, rollout, scores)))
    (plain, metrics, gradient, *_), (sorted_, sorted_metrics, sorted_gradient, *_) = found
    assert torch.allclose(plain, sorted_, atol=1e-5)
    assert metrics["staleness/decision"] == "stale"
    assert 0 < metrics["staleness/frac_stale"] < 1
    assert metrics["kl_ref"] > 0.01
    assert same(sorted_gradient, gradient, 1e-5)
    assert sorted_metrics["kl_ref"] == pytest.approx(metrics["kl_ref"], rel=1e-4)


def test_sorting_wastes_less():
    """Completions from 1 to 256 tokens, most of them short: at the same peak, padding halves."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.empty(64).exponential_(1 / 60, generator=generator).long().clamp(1, 256)
    prompts = [[7] * (20 + group % 5) for group in range(32) for _ in range(2)]
    mask = torch.arange(256) < tokens[:, None]
    rollout = make_rollout(prompts, Generated(torch.zeros(64, 256).long(), mask, torch.zeros(64, 256), mask.any(1)))

    def waste(**grpo):
        parts = [part for _, part in micro_batches(rollout, config_of(num_prompts_per_step=32, **grpo).grpo)]
        padded = [padded_tokens(part) for part in parts]
        return 1 - sum(map(real_tokens, parts)) / sum(padded), len(parts), max(padded)

    old, forwards, peak = waste(micro_batch_size=8)
    new, fewer, peak_then = waste(micro_batch_tokens=peak)
    assert (old, new) == pytest.approx((0.54, 0.25), abs=0.02)
    assert fewer <= forwards / 2
    assert peak_then <= peak
    assert waste(micro_batch_size=1)[0] == 0


def test_the_waste_is_logged(model, rollout):
    metrics = [stepped(model, config_of(micro_batch_size=size), rollout)[0] for size in (None, 4, 1)]
    prompts, inputs = rollout.prompt_mask.sum(1)[::2], rollout.completion_mask.sum(1).sub(1).clamp(min=0)
    lengths = prompts + inputs[::2] + inputs[1::2]  # a group's prompt once, and no completion's last token
    padded = 8 * int(lengths.max())
    assert metrics[0]["tokens_computed"] == padded
    assert metrics[0]["padding_waste"] == pytest.approx(1 - int(lengths.sum()) / padded)
    assert metrics[0]["padding_waste"] > metrics[1]["padding_waste"] > metrics[2]["padding_waste"] == 0


def test_both_ways_to_divide_an_update_are_refused():
    with pytest.raises(ValidationError, match=r"micro_batch_tokens=64 and micro_batch_size=4.*null"):
        GRPOConfig(micro_batch_tokens=64, micro_batch_size=4)
    given_tokens = GRPOConfig(model_name="some/model", micro_batch_tokens=4096)
    assert given_tokens.micro_batch_size is None
    assert GRPOConfig(**given_tokens.model_dump()) == given_tokens


def test_a_budget_too_small_for_a_row_or_a_judged_group_is_refused():
    needed = 6 + 6  # "12+34=" and the longest completion
    assert preflight(config_of(micro_batch_tokens=needed))
    with pytest.raises(ConfigError, match=rf"micro_batch_tokens = {needed - 1}: a row can take {needed} tokens"):
        preflight(config_of(micro_batch_tokens=needed - 1))
    groups = {"rule": "kl", "granularity": "group"}
    assert preflight(config_of(groups, micro_batch_tokens=2 * needed))
    with pytest.raises(ConfigError, match=rf"a group can take {2 * needed} tokens.*2 rows judged together"):
        preflight(config_of(groups, micro_batch_tokens=2 * needed - 1))


def test_a_run_by_token_budget_is_replayable_and_learns_the_same():
    def run(**grpo):
        return replay(small(grpo={"num_steps": 3, "lr": 1e-3, **grpo}))

    (rows, weights), (again, same_weights) = run(micro_batch_tokens=60), run(micro_batch_tokens=60)
    assert rows == again
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    whole, _ = run(micro_batch_size=None)
    assert rows[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-4, abs=1e-7)
    assert rows[0]["padding_waste"] < whole[0]["padding_waste"]


# ---- groups without signal ----


def test_signal_is_a_group_s():
    zeros = torch.zeros(6, 1)
    out = Generated(zeros.long(), zeros == 0, zeros, zeros[:, 0] == 0)
    rollout = make_rollout([[5]] * 6, out, advantages=torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, -0.0]))
    assert rows_with_signal(rollout).tolist() == [2, 3]


@pytest.mark.parametrize(
    "shape",
    [
        {"micro_batch_size": None, "loss_type": "dapo"},
        {"micro_batch_size": 4, "num_iterations": 2, "num_minibatches": 2, "correction": "decoupled"},
        {"micro_batch_tokens": 40, "loss_type": "dr_grpo"},
    ],
    ids=["whole", "rows", "tokens"],
)
@pytest.mark.parametrize("staleness", RULES, ids=lambda rule: f"{rule['rule']}-{rule.get('granularity', '')}")
def test_groups_without_signal_are_skipped_with_the_same_gradient(model, rollout, staleness, shape):
    """The oracle computes them: a penalty of weight 1e-30 keeps every row in and adds nothing to float32."""
    by_batch, by_rows = (staleness.get("granularity") in names for names in (("batch",), ("group", "sequence")))
    if by_rows:  # with beta rows without signal have a loss term, so another mean weight; unclipped it cancels
        staleness, shape = {**staleness, "apply_to": "loss"}, {**shape, "max_grad_norm": 100.0}
    quiet = without_signal(rollout, [0, 3, 4])
    scores = Scores(torch.where(quiet.completion_mask, -1.0, 0.0), (0.0, 1.0), 0.0)
    skipping = stepped(model, config_of(staleness, **shape), quiet)
    computing = stepped(model, config_of(staleness, beta=1e-30, **shape), quiet, scores)
    assert skipping[0]["rows_skipped"] == 6
    assert computing[0]["rows_skipped"] == 0
    assert by_batch or skipping[3] <= computing[3]
    assert skipping[0]["version"] == computing[0]["version"]
    assert same(skipping[1], computing[1], 1e-5)
    moved = float((computing[2] - torch.cat([p.detach().flatten() for p in model.parameters()])).norm())
    assert moved > 0
    assert float((skipping[2] - computing[2]).norm()) < 0.02 * moved  # where a gradient is 0, AdamW shows its rounding
    # a batch's KL is of all rows, others of those computed; rows that are not computed are fresh on their own
    numbers = STEP[:2] + STEP[3:] if by_rows else STEP + JUDGED if by_batch else STEP + JUDGED[1:]
    assert_close(skipping[0], computing[0], numbers)
    assert not by_rows or skipping[0]["staleness/frac_fresh"] >= 6 / 16


@pytest.mark.parametrize("rule", ["none", "kl"])
@pytest.mark.parametrize("grouping", [{"micro_batch_size": 2}, {"micro_batch_tokens": 12}])
def test_skipped_groups_cost_no_backward_and_a_forward_only_for_the_kl(model, rollout, grouping, rule):
    # two updates of four groups each: one keeps two groups, one none and is no update
    quiet = without_signal(rollout, [1, 3, 4, 5, 6, 7])
    staleness = {"rule": rule, "kl_fresh": 1, "kl_stale": 2}
    learner, calls = learner_of(model, config_of(staleness, num_minibatches=2, **grouping)), []
    learner.model.base_model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    metrics = learner.step(quiet).metrics
    assert 2 <= sum(calls) <= 4
    assert (len(calls) > 6) == (rule == "kl")
    assert (metrics["rows_skipped"], metrics["version"]) == (12, 1)


def test_entropy_and_ratio_are_of_the_computed_rows(model, rollout):
    quiet = without_signal(rollout, [0, 3, 4])
    kept = micro_batches(quiet, config_of(micro_batch_size=None).grpo, rows=rows_with_signal(quiet))[0][1]
    whole, _, _, _ = stepped(model, config_of(), quiet)
    alone, _, _, _ = stepped(model, config_of(num_prompts_per_step=5), kept)
    for name in ("entropy", "ratio/mean", "ess", "padding_waste"):
        assert whole[name] == pytest.approx(alone[name], rel=1e-6), name


def test_nothing_is_skipped_where_the_reference_penalty_counts(model, rollout):
    silent = dataclasses.replace(rollout, advantages=torch.zeros(16))
    scores = Scores(torch.where(silent.completion_mask, -1.0, 0.0), (0.0, 1.0), 0.0)
    metrics, gradient, _, calls = stepped(model, config_of(beta=0.1), silent, scores)
    assert (metrics["rows_skipped"], calls) == (0, 1)
    assert gradient.norm() > 0


def test_the_floor_is_measured_on_every_row(model, rollout):
    silent = dataclasses.replace(rollout, advantages=torch.zeros(16))
    learner = Learner(config_of({"rule": "none"}), copy.deepcopy(model))
    learner.step(silent)
    assert learner.floor > 1e-3
