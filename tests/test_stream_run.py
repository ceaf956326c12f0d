"""A stream on Ray equals its serial replay, bit for bit; free-running it is repeated from its record."""

import pytest
from conftest import read_jsonl, small
from drill import assert_same, oracle, outcome, run_killing
from test_replay import ci, slow

from overlaprl_ray.algorithm.stream import ticks_of
from overlaprl_ray.errors import RunError
from overlaprl_ray.runs.checkpoint import saved_steps
from overlaprl_ray.runtime.repeat import repeat
from overlaprl_ray.runtime.train import train


def stream(folder, lag, **groups):
    """A run of answers of 1 to 5 tokens in which batches are judged fresh, stale and discarded."""
    pipeline = {"generation": "stream", "mode": "overlap", "lag": lag, **groups.pop("pipeline", {})}
    grpo = {"num_steps": 10, "lr": 2e-3, **groups.pop("grpo", {})}
    output = {"dir": str(folder), "checkpoint_every": 0, "eval_every": 4, **groups.pop("output", {})}
    staleness = {"kl_fresh": 1e-3, "kl_stale": 0.1, **groups.pop("staleness", {})}
    return small(grpo=grpo, pipeline=pipeline, output=output, staleness=staleness, **groups)


@pytest.mark.parametrize(
    ("lag", "delay", "mode"),
    [
        slow(0, 3, "overlap"),
        slow(1, 0, "overlap"),
        ci(1, 3, "overlap"),
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
    """What timing decides differs from run to run; what was decided does not."""
    config = stream(
        tmp_path / "run", 2, pipeline={"schedule": "latest", "slots": 8}, staleness={"granularity": "group"}
    )
    train(config)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    taken = {step: tick for row in rows for step, tick in ticks_of(row["weights_ticks"]).items()}
    assert list(taken) == list(range(1, len(taken) + 1))
    assert 7 <= len(taken) <= 9
    assert list(taken.values()) == sorted(taken.values())
    assert "10 steps repeated, every row equal" in repeat(tmp_path / "run")


@pytest.mark.parametrize(
    ("schedule", "victims", "every"),
    [
        ci("exact", {5: ["generator"]}, 3),
        ("exact", {2: ["learner"], 8: ["reference"]}, 3),
        slow("latest", {5: ["learner"]}, 3),
        slow("exact", {5: ["generator", "learner"], 9: ["learner"]}, 2),
    ],
)
def test_a_stream_with_killed_actors_ends_as_if_undisturbed(local_ray, tmp_path, schedule, victims, every):
    pipeline = {"schedule": schedule, "delay": 3, "refresh_every": every}
    config = stream(tmp_path / "run", 2, pipeline=pipeline, output={"checkpoint_every": every})
    summary = run_killing(config, victims)
    assert summary["restarts"] == sum(map(len, victims.values()))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    if schedule == "exact":
        assert_same(outcome(tmp_path / "run"), oracle(config))
    assert "10 steps repeated, every row equal" in repeat(tmp_path / "run")
    assert saved_steps(tmp_path / "run")[0] in (6, 8, 9)
    assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))


@pytest.mark.ci
def test_an_interrupted_stream_is_resumed_from_its_checkpoint(local_ray, tmp_path):
    pipeline = {"delay": 3, "refresh_every": 3, "max_restarts": 0}
    config = stream(tmp_path / "run", 2, grpo={"num_steps": 16}, pipeline=pipeline, output={"checkpoint_every": 3})
    with pytest.raises(RunError, match="max_restarts = 0 is used up"):
        run_killing(config, {14: ["generator"]})
    assert saved_steps(tmp_path / "run")
    train(config, resume=True)
    assert_same(outcome(tmp_path / "run"), oracle(config))


@pytest.mark.ci
def test_without_a_checkpoint_a_death_ends_a_stream(local_ray, tmp_path):
    with pytest.raises(RunError, match="no checkpoint to go back to"):
        run_killing(stream(tmp_path / "run", 1), {3: ["generator"]})
