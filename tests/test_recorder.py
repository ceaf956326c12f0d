"""A run's folder: claimed by one run, complete, and honest about where it was made."""

import io
import json
from pathlib import Path

import pytest
import yaml
from conftest import read_jsonl, small
from rich.console import Console

from overlaprl_ray.errors import RunError
from overlaprl_ray.runs.environment import environment, git_commit
from overlaprl_ray.runs.progress import Progress
from overlaprl_ray.runs.ray_metrics import GAUGES
from overlaprl_ray.runs.recorder import Recorder
from overlaprl_ray.runs.summary import bounds
from overlaprl_ray.workers.results import Evaluation, StepResult


def result(step, start, **metrics) -> StepResult:
    """A step of a second's generation and two of training, one after the other."""
    spans = {"load": (start, start), "generate": (start, start + 1), "train": (start + 1, start + 3)}
    base = dict.fromkeys(GAUGES.values()) | {"step": step, "version": step, "tokens": 10, "samples": 4, "reward": 0.5}
    base |= {"staleness/decision": "fresh", "staleness/kl": 0.01, "staleness/lag": 0, "frac_reward_zero_std": 0.0}
    memory = {"generator": 0.1, "learner": 0.2}
    return StepResult(
        step,
        {**base, "faults": 0, **metrics},
        spans,
        memory,
        [{"step": step}],
        step - 1,
        [(0, 0, 0, "fresh", 4)],
        None,
        1e-9,
    )


def test_rows_add_up_and_times_leave_evaluations_out(tmp_path):
    recorder = Recorder(tmp_path / "run", small(pipeline={"mode": "sync"}), 2, dict, Progress(2, Console(quiet=True)))
    recorder.add_evaluation(Evaluation(0, 0, 0.25, 16, (0.0, 1.0)))
    recorder.add_step(result(1, 100.0))
    recorder.add_evaluation(Evaluation(1, 1, 0.5, 16, (103.0, 107.0)))  # the learner waits for all four seconds of it
    row = recorder.add_step(result(2, 107.0, reward=float("inf")))
    assert row["tokens"] == 20
    assert row["samples"] == 8
    assert row["time/step"] == pytest.approx(3.0)
    assert row["time/learner_wait"] == pytest.approx(1.0)
    assert row["time/generator_wait"] == pytest.approx(2.0)
    assert row["tokens_per_s"] == pytest.approx(10 / 3)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[1]["reward"] is None  # JSON has no infinity
    recorder.rows[1]["reward"] = 1.5
    summary = recorder.finish("done")
    assert (summary["accuracy_start"], summary["accuracy_final"]) == (0.25, 0.5)
    assert summary["reward_last_10"] == pytest.approx(1.0)
    assert summary["steps_per_s"] == pytest.approx(2 / 6)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_a_folder_is_taken_by_one_run_only_and_its_config_can_be_given_again(tmp_path):
    config = small(output={"dir": str(tmp_path / "run")})
    Recorder(tmp_path / "run", config, 2, dict, Progress(2, Console(quiet=True)))
    with pytest.raises(RunError, match="another run took it"):
        Recorder(tmp_path / "run", config, 2, dict, Progress(2, Console(quiet=True)))
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["output"]["dir"] is None
    assert saved["grpo"] == config.model_dump(mode="json")["grpo"]


@pytest.mark.parametrize(
    ("resume_from", "said"),
    [
        (3, ""),
        (2, "dropped 1 rows, of steps 3 to 3: the newest checkpoint to use is of step 2\n"),
        (0, "dropped 3 rows, of steps 1 to 3: there is no checkpoint to use\n"),
    ],
)
def test_rows_are_never_dropped_without_a_word(tmp_path, resume_from, said):
    quiet, console = Progress(3, Console(quiet=True)), Console(file=io.StringIO(), soft_wrap=True)
    first = Recorder(tmp_path, small(), 2, dict, quiet)
    first.add_evaluation(Evaluation(0, 0, 0.25, 16, (0.0, 1.0)))
    for step in (1, 2, 3):
        first.add_step(result(step, 100.0 * step))
    again = Recorder(tmp_path, small(), 2, dict, Progress(3, console), resume_from=resume_from)
    assert console.file.getvalue() == said
    assert len(again.rows) == resume_from


def test_commit_of_a_checkout_only(tmp_path, monkeypatch):
    assert environment()["git_commit"] == git_commit(Path(__file__).parents[1])
    assert git_commit(tmp_path) is None
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert git_commit(tmp_path) is None


@pytest.mark.parametrize(
    ("mode", "lag", "cores", "expected"),
    [("sync", 0, 2, 10), ("async", 1, 2, 6), ("overlap", 1, 2, 5), ("overlap", 4, None, 4), ("overlap", 4, 8, 4)],
)
def test_bounds_by_hand(mode, lag, cores, expected):
    stages = {"generate": 3.5, "reference": 2.0, "train": 3.75, "weights": 0.75, "publish": 0.25}
    assert bounds(stages, mode, lag, cores) == {"serial": 10.0, "bound": expected}
