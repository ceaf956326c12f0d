"""A stream on Ray equals its serial replay, bit for bit; free-running it is repeated from its record."""

import pytest
from conftest import read_jsonl, small
from drill import assert_same, kill_actor, oracle, outcome
from test_replay import slow

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runtime.repeat import repeat
from overlaprl_ray.runtime.train import train


def stream(folder, lag, **groups):
    """A run of answers of 1 to 5 tokens in which batches are judged fresh, stale and discarded."""
    pipeline = {"generation": "stream", "mode": "overlap", "lag": lag, **groups.pop("pipeline", {})}
    grpo = {"num_steps": 10, "lr": 2e-3, **groups.pop("grpo", {})}
    output = {"dir": str(folder), "checkpoint_every": 0, "eval_every": 4}
    staleness = {"kl_fresh": 1e-3, "kl_stale": 0.1, **groups.pop("staleness", {})}
    return small(grpo=grpo, pipeline=pipeline, output=output, staleness=staleness, **groups)


@pytest.mark.parametrize(
    ("lag", "delay", "mode"),
    [
        slow(0, 3, "overlap"),
        slow(1, 0, "overlap"),
        (1, 3, "overlap"),
        slow(1, 20, "staleness"),
        slow(3, 0, "async"),
        slow(3, 3, "overlap"),
        (3, 20, "overlap"),
    ],
)
def test_a_stream_on_ray_equals_its_replay(local_ray, tmp_path, lag, delay, mode):
    config = stream(tmp_path / "run", lag, pipeline={"mode": mode, "delay": delay})
    train(config)
    found, expected = outcome(tmp_path / "run"), oracle(config)
    assert_same(found, expected)
    assert [step for step, _, _ in found[1]] == [0, 4, 8, 10]
    if lag and mode == "overlap":
        assert {row["staleness/decision"] for row in found[0]} >= {"fresh", "discard"}
    assert "10 steps repeated, every row equal" in repeat(tmp_path / "run")


def test_a_free_running_stream_is_recorded_and_repeated(local_ray, tmp_path):
    """The paced reward makes the learner the faster one, so that weights come in the middle of a batch."""
    config = stream(
        tmp_path / "run", 2, pipeline={"schedule": "latest", "slots": 8}, staleness={"granularity": "group"}
    )
    train(config)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    taken = [int(tick) for row in rows for tick in row["weights_ticks"].split()]
    assert 7 <= len(taken) <= 9
    assert taken == sorted(taken)
    assert "10 steps repeated, every row equal" in repeat(tmp_path / "run")


@pytest.mark.parametrize("role", ["generator", pytest.param("learner", marks=pytest.mark.slow)])
def test_a_dead_worker_ends_a_stream_in_one_line(local_ray, tmp_path, role):
    config = stream(tmp_path / "run", 1)
    with pytest.raises(RunError, match="its running rows are lost"):
        train(config, on_row=lambda row: kill_actor(role) if row["step"] == 3 else None)
    with pytest.raises(ConfigError, match="a stream cannot be resumed yet"):
        train(config, resume=True)
