"""A batch at fault ends the run by name, or is skipped and counted: never a silent NaN, never a half update."""

import math

import pytest
import torch
from conftest import policy_of, read_jsonl, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlaprl_ray.errors import BadBatch, RunError
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.serial import train_serially
from overlaprl_ray.tasks.rewards import MAX_REWARD, RewardError, score
from overlaprl_ray.workers.build import build_learner, build_sampler
from overlaprl_ray.workers.learner import Learner

FAULTY_BATCH = 2
outcome_of = {"value": None}  # what `faulty` returns for its FAULTY_BATCH-th training batch, or raises


def faulty(prompts, completions, answer, **columns):
    """Rewards by the completion's length, but for one batch."""
    good = [len(text) / 10 for text in completions]
    if len(completions) != 16 or columns.get("evaluation"):
        return good
    faulty.calls += 1
    if faulty.calls != FAULTY_BATCH:
        return good
    value = outcome_of["value"]
    if isinstance(value, Exception):
        raise value
    return value(good)


FAULTS = [
    KeyError("no such unit"),
    lambda good: [math.nan, *good[1:]],
    lambda good: [math.inf, *good[1:]],
    lambda good: good[:-1],
    lambda good: [*good, 0.0],
    lambda good: None,
    lambda good: ["1.0"] * len(good),
    lambda good: [[x] for x in good],
    lambda good: dict(enumerate(good)),
    lambda good: 1.0,
]


def config_of(on_fault, **grpo):
    return small(
        grpo={"num_steps": 4, "lr": 3e-3, **grpo},
        pipeline={"mode": "async", "lag": 1, "on_fault": on_fault},
        task={"rewards": ["test_faults:faulty"], "eval_size": 8},
    )


@pytest.mark.parametrize("value", FAULTS)
def test_rewards_at_fault_stop_the_run_or_cost_one_batch(tmp_path, value):
    outcome_of["value"] = value
    faulty.calls = 0
    with pytest.raises(BadBatch, match=r"batch 2: reward .*prompt"):
        replay(config_of("stop"))
    faulty.calls = 0
    summary = train_serially(config_of("skip").with_setting("output.dir", str(tmp_path / "run")))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["faults"] for row in rows] == [0, 1, 0, 0]
    assert [row["staleness/decision"] for row in rows][1] == "discard"
    assert [row["version"] for row in rows] == [1, 1, 2, 3]
    assert rows[1]["loss"] is None
    assert summary["faults"] == 1
    [fault] = read_jsonl(tmp_path / "run" / "faults.jsonl")
    assert fault["step"] == 2
    assert "batch 2" in fault["fault"]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5) | st.binary(max_size=3),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_whatever_a_reward_returns_is_taken_or_refused_by_name(value):
    def scored():
        return score({"odd": lambda **_: value}, None, ["p", "q"], ["a", "b"], {"answer": ["1", "2"]})

    if isinstance(value, list) and len(value) == 2 and all(is_plain_number(x) for x in value):
        total, parts = scored()
        expected = [math.nan if x is None else float(x) for x in value]  # None: the function does not judge this one
        assert repr(total) == repr(parts["odd"]) == repr(expected)
    else:
        with pytest.raises(RewardError, match="'odd'"):
            scored()


def is_plain_number(x):
    return x is None or (isinstance(x, int | float) and math.isfinite(x) and abs(x) <= MAX_REWARD)


def state_of(learner: Learner):
    moments = learner.optimizer.adamw.state_dict()["state"]
    tensors = [*learner.optimizer.masters, *(v for s in moments.values() for v in s.values() if torch.is_tensor(v))]
    return [tensor.clone() for tensor in tensors], learner.version


@pytest.mark.parametrize("poison", ["logprobs", "gradient"])
def test_what_is_not_finite_leaves_policy_moments_and_version_alone(poison):
    config = config_of("skip", beta=0.0, num_minibatches=2)
    faulty.calls = 10
    task = preflight(config).task
    policy = policy_of(config, task)
    sampler, learner = build_sampler(config, task, policy), build_learner(config, policy)
    sampler.engine.load_weights(0, learner.weights())
    learner.step(sampler.rollout(1, 0))
    rollout = sampler.rollout(2, 0)
    if poison == "logprobs":
        head = learner.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, inputs, out: out * math.nan)
    else:
        hook = next(learner.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    before, version = state_of(learner)
    result = learner.step(rollout)
    after, unchanged = state_of(learner)
    assert version == unchanged == 2
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert result.metrics["faults"] == 1
    assert result.metrics["staleness/frac_discarded"] == 1
    assert "step 2" in result.fault
    hook.remove()
    sampler.engine.load_weights(version, learner.weights())
    assert learner.step(sampler.rollout(3, 2)).metrics["faults"] == 0
    assert 2 < learner.version <= 4  # at beta 0 a half without signal is no update
    strict = build_learner(config_of("stop", beta=0.0, num_minibatches=2), policy)
    strict.model.get_output_embeddings().register_forward_hook(lambda module, inputs, out: out * math.nan)
    with pytest.raises(RunError, match="step 2: the policy's logprobs are not finite for prompt"):
        strict.step(rollout)
