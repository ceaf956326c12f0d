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
    train(config)
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


@pytest.mark.parametrize(
    ("mode", "lag"),
    [("sync", 0), ("async", 0), ("async", 4), ("staleness", 1), ("overlap", 1), ("overlap", 4)],
)
def test_ray_run_equals_replay(local_ray, tmp_path, mode, lag):
    config = config_of(mode, lag)
    rows, weights = replay(config)
    assert_same(run(config, tmp_path / "run"), (cumulative(rows), weights))
    assert len(rows) == 8


def test_rerun_is_identical_and_another_seed_is_not(local_ray, tmp_path):
    config = config_of("overlap", 2)
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    assert_same(first, second)
    other, weights = run(config.model_copy(update={"seed": 1}), tmp_path / "c")
    assert other != first[0]
    assert not all(torch.equal(weights[name], first[1][name]) for name in weights)
