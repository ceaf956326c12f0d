"""Sweeps run by Ray Tune for real: what is run, what is run again, what fails and how it is told."""

import io
import json
import shutil
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import ray
import yaml
from conftest import read_jsonl
from rich.console import Console

from overlaprl_ray import ConfigError, RunError, train
from overlaprl_ray.config.cli import load_config
from overlaprl_ray.runs.recorder import is_time_field
from overlaprl_ray.tune.run import run_sweep
from overlaprl_ray.tune.spec import load_sweep

BASE = {
    "grpo": {"num_steps": 4, "num_prompts_per_step": 4, "group_size": 4},
    "model": {"tiny": {"warm_start_max_steps": 40, "warm_start_batch": 64}},
    "task": {"eval_size": 16, "rewards": ["dense_reward:digits"]},
    "pipeline": {"max_restarts": 0},
    "resources": {"generator_gpu": 0.15, "reference_gpu": 0.1, "learner_gpu": 0.2},
    "output": {"save_final": False, "checkpoint_every": 2},
}


def merged(base, **groups):
    return {**base, **{name: {**base.get(name, {}), **values} for name, values in groups.items()}}


def sweep_of(folder: Path, seeds=None, overrides=None, **parts):
    path = folder / "sweep-x.yaml"
    path.write_text(yaml.safe_dump({"base": BASE, **parts}, sort_keys=False), encoding="utf-8")
    return load_sweep(path, overrides, seeds)


def run(sweep, folder: Path) -> str:
    """Run it; returns what the table at its end said."""
    out = io.StringIO()
    run_sweep(sweep, folder, Console(file=out, width=200))
    return out.getvalue()


def trials_of(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "trials.parquet").sort_values("trial").set_index("trial")


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not is_time_field(name)} for row in rows]


def same_rows(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl", "decisions.jsonl", "completions.jsonl"):
        rows = [without_times(read_jsonl(folder / name)) for folder in (one, other)]
        for row in (*rows[0], *rows[1]):
            row.pop("generate_s", None)
        assert rows[0], name
        assert rows[0] == rows[1], name


def test_more_seeds_run_only_the_new_trials_and_a_finished_sweep_runs_none(local_ray, tmp_path, capsys):
    tune = {"serial": True}
    said = run(sweep_of(tmp_path, seeds=[0], tune=tune), tmp_path / "s")
    assert "1 trials" in said
    assert "0 finished before" in said
    assert "trials.parquet" in said
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "trials").glob("*/*")}
    assert first
    assert "[1/1] finished" in capsys.readouterr().out

    said = run(sweep_of(tmp_path, seeds=[0, 1], tune=tune), tmp_path / "s")
    assert "1 finished before" in said
    assert {path: path.stat().st_mtime_ns for path in first} == first
    trials = trials_of(tmp_path / "s")
    assert sorted(trials["seed"]) == [0, 1]
    assert set(trials["status"]) == {"done"}
    history = pd.read_parquet(tmp_path / "s" / "history.parquet")
    assert history.groupby("trial")["step"].apply(list).tolist() == 2 * [[1, 2, 3, 4]]
    assert "2 runs" in (tmp_path / "s" / "report.md").read_text()

    assert "2 finished before" in run(load_sweep(tmp_path / "sweep-x.yaml", seeds=[0, 1]), tmp_path / "s")
    assert len(list((tmp_path / "s" / "tune").iterdir())) == 2  # no third call of Tune


def test_a_trial_is_the_run_that_train_makes_of_its_configuration(local_ray, tmp_path):
    """Bit for bit, with actors and without; every step and the held-out accuracy reach Tune."""
    search = {"pipeline.mode": {"grid": ["overlap"]}, "pipeline.lag": {"grid": [2]}, "seed": {"grid": [7]}}
    sweep = sweep_of(tmp_path, search=search)
    run(sweep, tmp_path / "actors")
    run(sweep_of(tmp_path, search=search, tune={"serial": True}), tmp_path / "serial")
    trial = next((tmp_path / "actors" / "trials").iterdir())
    config = load_config(trial / "config.yaml", {"output.dir": str(tmp_path / "alone")})
    train(config, Console(quiet=True))
    same_rows(trial, tmp_path / "alone")
    same_rows(tmp_path / "serial" / "trials" / trial.name, tmp_path / "alone")
    (result,) = (tmp_path / "actors" / "tune").glob("*/*/result.json")
    reported = read_jsonl(result)
    assert [row["step"] for row in reported] == [1, 2, 3, 4, 4]  # the last one again, with the last evaluation
    evals = read_jsonl(tmp_path / "alone" / "eval.jsonl")
    assert reported[0]["eval/accuracy"] == evals[0]["accuracy"]
    assert reported[-1]["eval/accuracy"] == evals[-1]["accuracy"]
    assert [row["loss"] for row in reported[:4]] == [r["loss"] for r in read_jsonl(tmp_path / "alone/metrics.jsonl")]


def kills_its_process(prompts, completions, answer, **columns):
    """The out-of-memory killer's part, at the second batch (the first call is the evaluation)."""
    import os
    import signal

    kills_its_process.calls = getattr(kills_its_process, "calls", 0) + 1
    if kills_its_process.calls > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(i % 2) for i in range(len(completions))]


def test_failed_trials_are_rows_with_their_error_and_the_others_finish(local_ray, tmp_path):
    cases = [
        {"name": "well"},
        {"name": "killed", "task.rewards": ["test_sweep_run:kills_its_process"]},
        # weights grow by a factor of a million per update, four times per step
        {"name": "not finite", "grpo.weight_decay": 1e6, "grpo.lr": 1.0, "grpo.num_minibatches": 4},
        {"name": "too large", "grpo.clip_eps": 0.3, "resources.learner_gpu": 0.9},
    ]
    sweep = sweep_of(tmp_path, search={"cases": cases})
    with pytest.raises(RunError, match=r"^3 of 4 trials failed .* the same command tries them again$"):
        run(sweep, tmp_path / "s")
    names = {row["case"]: row["trial"] for row in json.loads((tmp_path / "s" / "plan.json").read_text())}
    trials = trials_of(tmp_path / "s")
    assert trials.loc[names["well"], "status"] == "done"
    assert pd.isna(trials.loc[names["well"], "error"])
    errors = {case: trials.loc[name, "error"] for case, name in names.items() if case != "well"}
    assert "an actor died while waiting for step 2" in errors["killed"]
    assert "step 1: the gradient's norm is nan" in errors["not finite"]
    assert "resources.generator_gpu = 0.15" in errors["too large"]
    assert "1.15 GPU in all, but there are 1" in errors["too large"]
    assert set(trials.loc[[names[case] for case in errors], "status"]) == {"error"}
    assert not (tmp_path / "s" / "trials" / names["too large"] / "metrics.jsonl").exists()  # refused, not tried
    assert trials.loc[names["too large"], "resources.learner_gpu"] == 0.9


def fails_once(prompts, completions, answer, **columns):
    """A fault that goes away, at the fourth batch of the first try."""
    from pathlib import Path

    fails_once.calls = getattr(fails_once, "calls", 0) + 1
    flag = Path(prompts_flag())
    if fails_once.calls > 4 and not flag.exists():
        flag.touch()
        raise OSError("the disk was away")
    return [float(sum(map(ord, text)) % 3) for text in completions]


def prompts_flag() -> str:
    import os

    return os.environ.get("OVERLAPRL_CACHE", "/tmp") + "/failed-once"


def test_a_failed_trial_is_tried_again_from_its_checkpoint(local_ray, tmp_path, cache):
    Path(prompts_flag()).unlink(missing_ok=True)
    base = merged(BASE, task={"rewards": ["test_sweep_run:fails_once"]}, pipeline={"mode": "sync"})
    sweep = sweep_of(tmp_path, base=base, tune={"max_failures": 1})
    run(sweep, tmp_path / "s")
    trial = next((tmp_path / "s" / "trials").iterdir())
    log = (tmp_path / "s" / "logs" / f"{trial.name}.log").read_text()
    assert "resuming after step 2" in log
    assert trials_of(tmp_path / "s")["status"].tolist() == ["done"]
    config = load_config(trial / "config.yaml", {"output.dir": str(tmp_path / "alone")})
    train(config, Console(quiet=True))  # the fault is gone
    same_rows(trial, tmp_path / "alone")


def slow(prompts, completions, answer, **columns):
    """A reward that takes its time."""
    import time

    time.sleep(0.3)
    return [float(i % 2) for i in range(len(completions))]


def wait_for(value, expected, seconds=30.0):
    """Whether a value of Ray's, which it updates with a delay, becomes the expected one."""
    deadline = time.monotonic() + seconds
    while abs(value() - expected) > 1e-6 and time.monotonic() < deadline:
        time.sleep(0.1)
    return abs(value() - expected) <= 1e-6


class Watch(threading.Thread):
    """Notes, while a sweep runs, how many trials Ray has placed and how much of its GPU they hold."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.seen: list[tuple[int, float]] = []  # (learners alive, GPU in use)

    def run(self):
        while not self.ended.wait(0.2):
            names = [a for a in ray.util.list_named_actors() if a.endswith("/learner")]
            self.seen.append((len(names), 1 - ray.available_resources().get("GPU", 0.0)))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *failure):
        self.ended.set()
        self.join()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("learner", "together"), [(0.2, 2), (0.35, 1)])
def test_two_small_trials_share_a_gpu_and_two_large_ones_do_not(local_ray, tmp_path, learner, together):
    """0.15 + 0.1 + 0.2 = 0.45 GPU each, or 0.6: read off Ray itself, which counts one (simulated) GPU."""
    base = merged(BASE, task={"rewards": ["test_sweep_run:slow"]}, resources={"learner_gpu": learner},
                  grpo={"num_steps": 20})  # fmt: skip
    sweep = sweep_of(tmp_path, base=base, search={"seed": {"grid": [0, 1]}})
    assert wait_for(lambda: ray.available_resources()["GPU"], 1.0)
    with Watch() as watch:
        run(sweep, tmp_path / "s")
    assert max(count for count, _ in watch.seen) == together
    assert max(used for _, used in watch.seen) == pytest.approx(together * (0.25 + learner), abs=1e-3)
    assert trials_of(tmp_path / "s")["status"].tolist() == ["done", "done"]


def test_a_folder_serves_one_sweep_at_a_time(local_ray, tmp_path):
    from filelock import FileLock

    (tmp_path / "s").mkdir()
    with FileLock(tmp_path / "s" / ".lock"), pytest.raises(ConfigError, match="another sweep is at work there"):
        run(sweep_of(tmp_path), tmp_path / "s")
    assert [path.name for path in (tmp_path / "s").iterdir() if path.name != "trials"] == [".lock"]


def test_nothing_starts_where_no_trial_can_run(local_ray, tmp_path):
    with pytest.raises(ConfigError, match=r"trial \(task.rewards=\['nosuch'\]\).*nosuch"):
        run(sweep_of(tmp_path, search={"task.rewards": {"grid": [["gsm8k"], ["nosuch"]]}}), tmp_path / "s")
    with pytest.raises(ConfigError, match=r"no trial finds room: .*but there are 1"):
        run(sweep_of(tmp_path, base=merged(BASE, resources={"learner_gpu": 0.9})), tmp_path / "s")
    assert not list((tmp_path / "s").glob("trials/*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_optuna_and_asha_search_for_real_and_go_on_where_they_were_cut(local_ray, tmp_path, monkeypatch):
    """Six suggestions of Optuna, of which ASHA ends some early; constraints hold; calling again runs nothing."""
    search = {"grpo.lr": {"loguniform": [1e-4, 1e-2]}, "staleness.kl_fresh": {"uniform": [0.01, 0.3]},
              "staleness.kl_stale": {"uniform": [0.02, 0.3]}, "pipeline.lag": {"randint": [0, 3]},
              "grpo.num_minibatches": {"choice": [1, 2]}}  # fmt: skip
    tune = {"search_algorithm": "optuna", "scheduler": "asha", "samples": 6, "metric": "reward", "serial": True,
            "asha_grace_steps": 2, "asha_reduction": 2, "max_concurrent": 2}  # fmt: skip
    base = merged(BASE, grpo={"num_steps": 8}, pipeline={"mode": "staleness"})
    sweep = sweep_of(tmp_path, base=base, search=search, tune=tune,
                     constraints=["staleness.kl_fresh < staleness.kl_stale"])  # fmt: skip
    run(sweep, tmp_path / "s")
    trials = trials_of(tmp_path / "s")
    assert len(trials) == 6
    assert set(trials["status"]) == {"done", "interrupted"}
    early = trials[trials["status"] == "interrupted"]
    assert set(early["steps"]) <= {2, 3, 4, 5, 6, 7}
    assert (trials["steps"] == 8).sum() + len(early) == 6
    assert trials["grpo.lr"].nunique() == 6
    assert (trials["staleness.kl_fresh"] < trials["staleness.kl_stale"]).all()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "trials").glob("*/metrics.jsonl")}
    run(sweep, tmp_path / "s")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "trials").glob("*/metrics.jsonl")} == before
    other = sweep_of(tmp_path, base=base, search=search, tune={**tune, "samples": 7})
    with pytest.raises(ConfigError, match="holds a search with other settings"):
        run(other, tmp_path / "s")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trial_that_reaches_its_aim_is_stopped_for_good(local_ray, tmp_path):
    base = merged(BASE, grpo={"num_steps": 50})
    sweep = sweep_of(tmp_path, base=base, tune={"serial": True, "stop": {"step": 3}})
    run(sweep, tmp_path / "s")
    trials = trials_of(tmp_path / "s")
    assert trials["status"].tolist() == ["interrupted"]
    assert trials["steps"].tolist() in ([3], [4])
    started = time.monotonic()
    assert "1 finished before" in run(sweep, tmp_path / "s")
    assert time.monotonic() - started < 20
    shutil.rmtree(tmp_path / "s")
