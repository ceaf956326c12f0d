"""Every Ray run equals the serial oracle, bit for bit: metrics (times and memory aside) and final weights."""

import pytest
import torch
from conftest import read_jsonl, small
from safetensors.torch import load_file

from overlaprl_ray.recorder import is_time_field
from overlaprl_ray.replay import replay
from overlaprl_ray.run import train

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
    config = config.model_copy(update={"output": config.output.model_copy(update={"dir": str(folder)})})
    summary = train(config)
    if config.pipeline.mode == "sync":
        assert summary["overlap_fraction"] == 0
    return untimed(read_jsonl(folder / "metrics.jsonl")), load_file(folder / "final" / "model.safetensors")


def assert_same(left, right):
    (left_rows, left_weights), (right_rows, right_weights) = left, right
    assert left_rows == right_rows
    shared = left_weights.keys() & right_weights.keys()
    assert len(shared) > 10
    for name in shared:
        assert torch.equal(left_weights[name], right_weights[name]), name


def config_of(mode, lag, **groups):
    grpo = {"num_steps": 8, "lr": 3e-3, **groups.pop("grpo", {})}
    return small(grpo=grpo, pipeline={"mode": mode, "lag": lag}, staleness=groups.pop("staleness", STALE), **groups)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


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
        ("overlap", 1),
        ("overlap", 4),
    ],
)
def test_ray_run_equals_replay(local_ray, tmp_path, mode, lag):
    config = config_of(mode, lag)
    rows, weights = replay(config)
    assert_same(run(config, tmp_path / "run"), (cumulative(rows), weights))
    assert len(rows) == 8


def test_rerun_is_identical_and_another_seed_is_not(local_ray, tmp_path):
    config = config_of("overlap", 2, grpo={"beta": 0.0})
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    assert_same(first, second)
    other, weights = run(config.model_copy(update={"seed": 1}), tmp_path / "c")
    assert other != first[0]
    assert not all(torch.equal(weights[name], first[1][name]) for name in weights)


def test_lag_zero_is_sync_where_no_rule_fires():
    rows, weights = replay(config_of("sync", 3))
    for mode in ("async", "staleness", "overlap"):
        other_rows, other_weights = replay(config_of(mode, 0, staleness={"kl_fresh": 5, "kl_stale": 10}))
        assert other_rows == rows
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)


def test_lag_and_rule_change_the_run():
    """So that the equalities above say something."""
    sync, lagged, judged = (replay(config_of(*kind))[0] for kind in [("sync", 0), ("async", 4), ("staleness", 4)])
    assert sync != lagged
    assert lagged != judged
    assert {row["staleness/decision"] for row in judged} >= {"fresh", "discard"}
