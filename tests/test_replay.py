"""Every Ray run equals the serial oracle, bit for bit: metrics (times and memory aside) and final weights."""

import pytest
import torch
from conftest import read_jsonl, small
from safetensors.torch import load_file

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runs.recorder import is_time_field
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.train import train

STALE = {"kl_fresh": 1e-6, "kl_stale": 1e-3}  # low enough that all three decisions occur in a few steps


def untimed(rows):
    return [{k: v for k, v in row.items() if not is_time_field(k)} for row in rows]


def cumulative(rows):
    """Replay's rows count per step; a run's files count from the start."""
    totals = {"tokens": 0, "samples": 0}
    out = []
    for row in rows:
        for name in totals:
            totals[name] += row[name]
        out.append({**row, **totals})
    return out


def run(config, folder):
    """A Ray run's rows and final weights."""
    summary = train(config.with_setting("output.dir", str(folder)))
    if config.pipeline.mode == "sync":
        assert summary["overlap_fraction"] == 0
    return untimed(read_jsonl(folder / "metrics.jsonl")), load_file(folder / "final" / "model.safetensors")


def assert_same(left, right):
    (left_rows, left_weights), (right_rows, right_weights) = left, right
    assert left_rows == right_rows
    assert left_weights.keys() == right_weights.keys()
    for name in left_weights:
        assert torch.equal(left_weights[name], right_weights[name]), name


def config_of(mode, lag, **groups):
    grpo = {"num_steps": 8, "lr": 3e-3, **groups.pop("grpo", {})}
    pipeline = {"mode": mode, "lag": lag, **groups.pop("pipeline", {})}
    return small(grpo=grpo, pipeline=pipeline, staleness=groups.pop("staleness", STALE), **groups)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def ci(*values):
    return pytest.param(*values, marks=pytest.mark.ci)


@pytest.mark.parametrize(
    ("mode", "lag"),
    [
        ("sync", 0),
        slow("async", 0),
        slow("async", 1),
        ("async", 4),
        slow("staleness", 0),
        ("staleness", 1),
        slow("staleness", 4),
        slow("overlap", 0),
        slow("overlap", 1),
        ("overlap", 4),
    ],
)
def test_ray_run_equals_replay(local_ray, tmp_path, mode, lag):
    config = config_of(mode, lag)
    rows, weights = replay(config)
    assert_same(run(config, tmp_path / "run"), (cumulative(rows), weights))
    assert len(rows) == 8


GRADED = {"kl_fresh": 1e-3, "kl_stale": 1.0}  # wide enough that most batches get a weight between 0 and 1
NO_RULE = {"rule": "none"}
UPDATES = {"num_minibatches": 4, "num_iterations": 2, "correction": "decoupled", "correction_cap": 1.05}
FALLING = {"num_steps": 5, "lr_warmup_steps": 2, "lr_schedule": "cosine", "lr_min_ratio": 0.1}
SEQUENCES = {"micro_batch_size": 5, "loss_type": "dapo", "importance_level": "sequence", "num_iterations": 2}


@pytest.mark.parametrize(
    "groups",
    [
        # two generators over three groups: shares of one and of two
        {
            "grpo": {**UPDATES, "num_prompts_per_step": 3, "num_minibatches": 3},
            "staleness": {"rule": "opsm"},
            "resources": {"num_generators": 2},
        },
        ci({"grpo": FALLING, "staleness": {**GRADED, "apply_to": "lr"}}),
        ci(
            {
                "grpo": {"num_steps": 5, "beta": 0.0},
                "staleness": {**GRADED, "granularity": "sequence", "apply_to": "loss"},
            }
        ),
        slow({"grpo": FALLING, "staleness": {**GRADED, "granularity": "group", "apply_to": "update"}}),
        # late batches, out of order among others
        {"pipeline": {"late_share": 0.4, "late_lag": 3}, "output": {"checkpoint_every": 0}, "staleness": GRADED},
        slow({"grpo": FALLING, "staleness": {"rule": "ess", "apply_to": "lr"}}),
        slow({"grpo": {"num_minibatches": 2}, "staleness": {"rule": "random", "discard_probability": 0.5}}),
        slow({"grpo": SEQUENCES, "staleness": {"rule": "m2po", "m2po_tau": 1e-3}}),
        slow({"grpo": {"micro_batch_size": 3}, "model": {"dtype": "bfloat16", "gradient_checkpointing": True}}),
        ci(
            {
                "grpo": {"num_steps": 5, "oversample": 1.5, "correction": "icepop", "num_iterations": 2},
                "resources": {"num_generators": 2},
            }
        ),
        slow({"grpo": {"loss_type": "cispo", "correction": "sequence_mask", "num_iterations": 2}}),
    ],
)
def test_unusual_runs_equal_replay_too(local_ray, tmp_path, groups):
    config = config_of("overlap", 2, **groups)
    rows, weights = replay(config)
    ray_rows, ray_weights = run(config, tmp_path / "run")
    assert ray_rows == cumulative(rows)
    if config.model.dtype == "float32":  # final/ holds the float32 masters, replay returns the bfloat16 policy
        assert_same((ray_rows, ray_weights), (cumulative(rows), weights))


def test_latest_cannot_be_replayed_without_a_record():
    config = small(pipeline={"schedule": "latest"})
    with pytest.raises(ConfigError, match="give the record"):
        replay(config)


def test_the_seed_changes_the_run():
    rows, other = (replay(config_of("overlap", 2, seed=seed))[0] for seed in (0, 1))
    assert rows != other


@pytest.mark.slow
def test_rerun_is_identical_and_another_seed_is_not(local_ray, tmp_path):
    config = config_of("overlap", 2, grpo={"beta": 0.0})
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    assert_same(first, second)
    other, weights = run(config.with_setting("seed", 1), tmp_path / "c")
    assert other != first[0]
    assert not all(torch.equal(weights[name], first[1][name]) for name in weights)


def test_lag_zero_is_sync_where_no_rule_fires():
    rows, weights = replay(config_of("sync", 3))
    for mode in ("async", "staleness", "overlap"):
        other_rows, other_weights = replay(config_of(mode, 0, staleness={"kl_fresh": 5, "kl_stale": 10}))
        assert other_rows == rows
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)


def test_what_a_weight_applies_to_changes_the_run():
    """So that the equalities above say something."""
    runs = {}
    for apply_to in ("update", "loss", "lr"):
        runs[apply_to] = replay(config_of("overlap", 2, grpo=FALLING, staleness={**GRADED, "apply_to": apply_to}))[0]
        assert any(0 < row["staleness/weight"] < 1 for row in runs[apply_to])
        assert len({row["lr"] for row in runs[apply_to]}) == 4  # the second step of warm-up ends at the peak
    assert runs["update"] != runs["loss"] != runs["lr"] != runs["update"]


@pytest.mark.parametrize("rule", [{"rule": "ess", "apply_to": "lr"}, {"rule": "random", "discard_probability": 0.5}])
def test_rules_of_the_study_change_the_run(rule):
    judged, plain = (replay(config_of("overlap", 2, grpo={"num_steps": 5}, staleness=r))[0] for r in (rule, NO_RULE))
    assert judged != plain
    assert 0 < sum(row["staleness/weight"] for row in judged) < 5


def test_lag_and_rule_change_the_run():
    sync, lagged, judged = (replay(config_of(*kind))[0] for kind in [("sync", 0), ("async", 4), ("staleness", 4)])
    assert sync != lagged
    assert lagged != judged
    assert {row["staleness/decision"] for row in judged} >= {"fresh", "discard"}
