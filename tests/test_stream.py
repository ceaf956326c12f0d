"""The stream: its plan, its engine, and the law that with lag 0 it is `sync`."""

import math
import random

import pytest
import torch
from conftest import small
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig

from overlaprl_ray.algorithm.rules import RULES, GateInputs
from overlaprl_ray.algorithm.stream import StreamPlan, oldest_token_step
from overlaprl_ray.config import StalenessConfig, TinyConfig
from overlaprl_ray.config.cli import build_config
from overlaprl_ray.engines.hf import HFEngine, row_uniforms, sample
from overlaprl_ray.engines.stream import HFStream, StreamRow, generated
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.architecture import check_joinable
from overlaprl_ray.models.folders import find_models
from overlaprl_ray.models.tiny import tiny_config
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.tasks import build_task
from overlaprl_ray.workers.build import build_learner, build_sampler
from overlaprl_ray.workers.learner import Learner
from overlaprl_ray.workers.stream import StreamSampler

# ---- the plan ----


def play(plan, lengths, batches, ready=None):
    """Run a plan whose group g has rows of `lengths(g)` tokens; `ready()` says whether weights asked for are there.

    Returns the ticks of take-overs, and of each batch: groups, tick of its end, oldest step behind a token.
    """
    left, first, ticks, seen = {}, {}, [], []

    def take(batch):
        plan.taken += 1
        ticks.append(plan.tick)
        assert batch - 1 - plan.lag <= plan.taken <= batch - 1, "weights that the call was not given"

    for batch in range(1, batches + 1):
        while (groups := plan.end_batch()) is None:
            while plan.is_due or (plan.is_free and ready()):
                take(batch)
            for group in plan.admit():
                left[group], first[group] = list(lengths(group)), plan.taken
            assert plan.running == sum(len(rows) for rows in left.values()) <= plan.slots
            if plan.running:
                ended = [group for group, rows in left.items() for length in rows if length == 1]
                left = {group: [n - 1 for n in rows if n > 1] for group, rows in left.items()}
                plan.advance(ended)
            elif plan.is_free:
                take(batch)
            else:
                plan.jump()
        seen.append((groups, plan.tick, min(first[group] for group in groups)))
    return ticks, seen


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 0, 3, 40]), st.randoms())
def test_whatever_the_lengths_the_plan_goes_on_within_its_bound_and_its_record_repeats_it(
    lag, prompts, size, delay, rng
):
    """Long tails among the lengths; `latest` (no delay) with weights ready at random."""
    slots = size * rng.randint(1, 2 * prompts)
    drawn = {g: [rng.choice([1, 2, 3, 60]) for _ in range(size)] for g in range(40 * prompts)}
    plan = StreamPlan(lag, prompts, size, slots, delay)
    ticks, seen = play(plan, drawn.__getitem__, 25, ready=lambda: rng.random() < 0.3)
    groups = [group for batch, _, _ in seen for group in batch]
    assert len(set(groups)) == 25 * prompts, "a group trained on twice"
    assert all(batch == sorted(batch) for batch, _, _ in seen)
    assert all(oldest >= oldest_token_step(number, lag) for number, (_, _, oldest) in enumerate(seen, start=1))
    if lag == 0:
        assert groups == list(range(25 * prompts))
    record = dict(enumerate(ticks, start=1))
    again = StreamPlan(lag, prompts, size, slots, delay, recorded=record, settled=math.inf)
    assert play(again, drawn.__getitem__, 25) == (ticks, seen)


def test_the_plan_by_hand():
    """Two groups of one row a batch, lag 1, three slots; group 1 is long. Weights 1 are due at tick 1 + 2."""
    plan = StreamPlan(lag=1, prompts=2, group_size=1, slots=3, delay=2)
    lengths = {0: [1], 1: [9], 2: [1], 3: [2], 4: [1], 5: [1], 6: [1], 7: [1]}
    ticks, seen = play(plan, lengths.__getitem__, 3)
    # tick 0: groups 0 to 2 start; 1: 0 and 2 end (batch 1), 3 starts, four are admitted and none is counted; 3: 3 ends,
    # weights 1 are taken over and 4 and 5 start; 4: 4 and 5 end, 3 and 4 are batch 2; then group 1 of call 1, two calls
    # back, blocks: 9: it ends, weights 2 were due at 6, and 5 and 1 are batch 3 in the order of their numbers
    assert seen == [([0, 2], 1, 0), ([3, 4], 4, 0), ([1, 5], 9, 0)]
    assert ticks == [3, 6]


def test_a_plan_waits_for_what_never_comes_only_where_its_record_is_another_runs():
    plan = StreamPlan(lag=0, prompts=1, group_size=1, slots=1, delay=0, settled=math.inf)
    with pytest.raises(RunError, match="record of another run"):
        play(plan, lambda group: [1], 2)


# ---- the engine ----


@pytest.fixture(scope="module", params=["full prompts", "short prompts"])
def prompts(request):
    """Groups of three rows with one prompt each; prompts of 32 tokens or more are prefilled once."""
    rng = random.Random(0)
    width = 40 if request.param == "full prompts" else 3
    return [[rng.randrange(3, 45) for _ in range(width + 2 * group)] for group in range(4)]


def alone(engine, row, weights, refreshed):
    """Logprobs of a row's tokens as a naive loop has them: its own cache, `weights[i]` before its i-th token, and all
    keys and values anew before the tokens `refreshed`."""
    cache, text, found = DynamicCache(config=engine.model.config), list(row.prompt), []
    uniforms = row_uniforms([row.seed], len(row.ids))[0]
    for i, token in enumerate(row.ids):
        engine.load_weights(i, weights[i])
        if i in refreshed:
            cache, text = DynamicCache(config=engine.model.config), [*row.prompt, *row.ids[:i]]
        logits = engine.model(input_ids=torch.tensor([text]), past_key_values=cache).logits[:, -1]
        drawn, logprob = sample(logits, 0.9, uniforms[i : i + 1])
        assert int(drawn) == token
        found.append(float(logprob))
        text = [token]
    return found


@torch.no_grad()
def test_rows_of_different_ticks_have_the_logprobs_each_has_alone_across_changes_of_weights(prompts):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(TinyConfig())).eval()
    engine = HFEngine(model, pad_id=0, eos_ids=tuple(range(1, 8)))
    sets = [{name: p * (2 + i) for name, p in model.named_parameters()} for i in range(3)]
    stream, held, rows, ended = HFStream(engine, max_new_tokens=12, temperature=0.9), {}, [], []
    for tick in range(40):
        if tick % 5 == 0:
            engine.load_weights(tick, sets[tick // 5 % 3])
        if tick in (5, 15):
            stream.refresh()
        if tick in (0, 3, 4, 9):
            group = (0, 3, 4, 9).index(tick)
            rows += [StreamRow(group, prompts[group], (0, group, i)) for i in range(3)]
            stream.admit(rows[-3:])
        held[tick] = sets[tick // 5 % 3]
        if any(not row.ended for row in rows):
            ended += stream.tick()
            for row in rows:
                row.start = getattr(row, "start", tick)
    assert sorted(map(id, ended)) == sorted(map(id, rows))
    assert len({len(row.ids) for row in rows}) > 2
    assert len({len(set(row.versions)) for row in rows}) > 1
    for row in rows:
        assert row.versions == [(row.start + i) // 5 * 5 for i in range(len(row.ids))]
        fresh = {5 - row.start, 15 - row.start}
        expected = alone(engine, row, [held[row.start + i] for i in range(len(row.ids))], fresh)
        assert row.logprobs == pytest.approx(expected, abs=1e-4)
    out = generated(rows, pad_id=0)
    assert out.mask.sum(1).tolist() == [len(row.ids) for row in rows]
    assert out.finished.tolist() == [row.ids[-1] in engine.eos_ids for row in rows]
    assert (out.logprobs[~out.mask] == 0).all()


# ---- the serial replay ----

STALE = {"kl_fresh": 1e-3, "kl_stale": 0.3}


def stream(lag=1, mode="overlap", **groups):
    pipeline = {"mode": mode, "lag": lag, "generation": "stream", **groups.pop("pipeline", {})}
    grpo = {"num_steps": 6, "lr": 2e-3, **groups.pop("grpo", {})}
    output = {"checkpoint_every": 0, "eval_every": 2, **groups.pop("output", {})}
    return small(**{"grpo": grpo, "pipeline": pipeline, "output": output, "staleness": STALE, **groups})


def outcome(config):
    found = []
    rows, weights = replay(config, on_evaluation=lambda e: found.append((e.step, e.version, e.accuracy, e.n)))
    return rows, weights, found


@pytest.mark.parametrize(("mode", "delay"), [("sync", None), ("sync", 7), ("overlap", 0)])
def test_with_lag_zero_a_stream_is_sync_bit_for_bit(mode, delay):
    config = stream(lag=0, mode=mode, pipeline={"delay": delay}, staleness={"rule": "none"})
    rows, weights, evaluations = outcome(config)
    expected, its_weights, its_evaluations = outcome(config.with_setting("pipeline.generation", "batch"))
    assert [{name: row[name] for name in its} for row, its in zip(rows, expected, strict=True)] == expected
    assert all(torch.equal(weights[name], its_weights[name]) for name in its_weights)
    assert evaluations == its_evaluations
    assert [done[0] for done in evaluations] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("lag", "pipeline", "granularity"),
    [(1, {"delay": 3}, "sequence"), (3, {"delay": 3, "slots": 8}, "group"), (1, {"delay": 300}, "batch")],
)
def test_tokens_know_their_versions_and_stay_within_the_bound(monkeypatch, lag, pipeline, granularity):
    """With short answers and a delay of 300 ticks the counter jumps."""
    seen, step = [], Learner.step
    monkeypatch.setattr(
        Learner,
        "step",
        lambda self, rollout, scores: (seen.append((self.version, rollout)), step(self, rollout, scores))[1],
    )
    config = stream(lag, pipeline=pipeline, grpo={"num_steps": 8}, staleness={**STALE, "granularity": granularity})
    rows, _, evaluations = outcome(config)
    assert [done[0] for done in evaluations] == [0, 2, 4, 6, 8]
    for row, (now, rollout) in zip(rows, seen, strict=True):
        mask, versions = rollout.completion_mask, rollout.versions
        assert rollout.version == versions[mask].min() == now - row["staleness/lag"]
        assert row["staleness/lag_mean"] == pytest.approx(float((now - versions[mask].double()).mean()))
        assert (versions.diff(dim=1)[mask[:, 1:]] >= 0).all()
        assert row["weights_step"] >= oldest_token_step(row["step"], lag)
        mixed = [len(set(line[held].tolist())) > 1 for line, held in zip(versions, mask, strict=True)]
        assert row["stream/frac_crossed"] == pytest.approx(float(mask[mixed].sum() / mask.sum()))
        assert (row["staleness/kl_crossed"] is None) == (not any(mixed))
    assert {row["staleness/decision"] for row in rows} >= {"fresh", "stale"}
    assert max(row["stream/rows"] for row in rows) <= pipeline.get("slots", 16)
    assert rows[-1]["stream/tick"] > (600 if pipeline["delay"] == 300 else 10)


def test_a_stream_goes_on_from_its_state_bit_for_bit():
    config = stream(2, pipeline={"delay": 3, "refresh_every": 2}, output={"checkpoint_every": 2}, grpo={"num_steps": 8})
    task = build_task(config.task)
    policy = find_models(config, task.train).policy
    learner = build_learner(config, policy)
    sets = {step: {n: p * (1 + step / 40) for n, p in learner.weights().items()} for step in range(9)}

    def begin():
        return StreamSampler(build_sampler(config, task, policy), StreamPlan.of(config), evaluated=(0, 4))

    def weights(step, wait):
        return step, sets[step]

    first = begin()
    made = [first.batch(number, weights) for number in range(1, 9)]
    states = {
        step: (number, state) for number, (_, report) in enumerate(made, 1) for step, state in report.states.items()
    }
    assert sorted(states) == [2, 4, 6]
    assert sum(len(state["running"]) for _, state in states.values()) > 10
    for step, (number, state) in states.items():
        again = begin()
        again.load(state, weights)
        for k in range(number, 9):
            rollout, report = again.batch(k, weights)
            for name in ("completion_ids", "logprobs", "versions", "rewards"):
                assert torch.equal(getattr(rollout, name), getattr(made[k - 1][0], name)), (step, k, name)
            assert rollout.stream["weights_ticks"] == made[k - 1][0].stream["weights_ticks"]
            assert rollout.stream["stream/rows"] == made[k - 1][0].stream["stream/rows"]
            expected = [done.step for done in made[k - 1][1].evaluations if done.step >= step]
            assert [done.step for done in report.evaluations] == expected


def test_rule_version_judges_a_row_by_its_oldest_token():
    inputs = GateInputs(
        torch.zeros(3, 2), torch.ones(3, 2).bool(), torch.ones(3), torch.zeros(3).long(), torch.tensor([0, 2, 3])
    )
    assert RULES["version"](inputs, StalenessConfig(rule="version", max_lag=2)).weight.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resources": {"num_generators": 2}}, "resources.num_generators=2 cannot be combined"),
        ({"model": {"engine": "vllm", "tiny": {"heads": 2}}}, "model.engine=vllm cannot be combined"),
        ({"grpo": {"oversample": 2}}, r"grpo.oversample=2\.0 cannot be combined"),
        ({"pipeline": {"late_share": 0.1}}, "pipeline.late_share=0.1 cannot be combined"),
        ({"output": {"checkpoint_every": 75}}, "output.checkpoint_every=75 must be a multiple of .*refresh_every=50"),
        ({"output": {"checkpoint_every": 5}, "pipeline": {"refresh_every": 0}}, "output.checkpoint_every=5 must be"),
        ({"pipeline": {"slots": 7}}, "pipeline.slots=7 holds no group of grpo.group_size=8"),
        ({"pipeline": {"delay": -1}}, "pipeline.delay = -1"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(settings, message):
    values = {"output": {"checkpoint_every": 0}, **settings}
    values["pipeline"] = {"generation": "stream", **settings.get("pipeline", {})}
    with pytest.raises(ConfigError, match=message):
        build_config(values)


def test_a_model_whose_cache_rows_cannot_be_joined_is_refused():
    check_joinable(tiny_config(TinyConfig()), "tiny")
    with pytest.raises(ConfigError, match=r"cannot be joined \(DynamicSlidingWindowLayer\)"):
        check_joinable(MistralConfig(sliding_window=10), "some/mistral")
