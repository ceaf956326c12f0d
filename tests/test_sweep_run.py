"""Sweeps run by Ray Tune for real: what is run, what is run again, what fails and how it is reported."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml
from conftest import read_jsonl
from rich.console import Console

from overlaprl_ray import ConfigError, RunError
from overlaprl_ray.config.cli import load_config
from overlaprl_ray.runs.recorder import is_time_field
from overlaprl_ray.runtime.serial import train_serially
from overlaprl_ray.tune.run import run_sweep
from overlaprl_ray.tune.spec import load_sweep

ROOT = Path(__file__).parent.parent
BASE = {
    "grpo": {"num_steps": 4, "num_prompts_per_step": 4, "group_size": 4},
    "model": {"tiny": {"warm_start_max_steps": 40, "warm_start_batch": 64}},
    "task": {"eval_size": 16, "rewards": ["dense_reward:digits"]},
    "pipeline": {"mode": "overlap", "lag": 1, "max_restarts": 0},
    "resources": {"generator_gpu": 0.15, "reference_gpu": 0.1, "learner_gpu": 0.2},
    "output": {"save_final": False, "checkpoint_every": 2},
}


def merged(base, **groups):
    return {**base, **{name: {**base.get(name, {}), **values} for name, values in groups.items()}}


def write(folder: Path, **parts) -> Path:
    path = folder / "sweep-x.yaml"
    path.write_text(yaml.safe_dump({"base": BASE, **parts}, sort_keys=False), encoding="utf-8")
    return path


def run(folder: Path, seeds=None, **parts) -> None:
    """Run a sweep in `folder`/s; what it says goes to standard output."""
    run_sweep(load_sweep(write(folder, **parts), seeds=seeds), folder / "s", Console(width=200, soft_wrap=True))


def script(*arguments: object) -> None:
    """`scripts/sweep.py` in this process: another would only import torch again."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from sweep import main

    main([*map(str, arguments)])


def trials_of(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "trials.parquet").sort_values("trial").set_index("trial")


def names(folder: Path) -> dict[str, str]:
    """Case -> trial."""
    return {row["case"]: row["trial"] for row in json.loads((folder / "plan.json").read_text())}


def statuses(folder: Path) -> list[tuple[str, int]]:
    summaries = [json.loads(path.read_text()) for path in sorted(folder.glob("trials/*/summary.json"))]
    return [(summary["status"], summary["steps"]) for summary in summaries]


def times(folder: Path, name: str = "*") -> dict[Path, int]:
    """When each trial's files were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"trials/*/{name}")}


def resumed_after(trial: Path) -> list[str]:
    """The steps after which a trial was resumed, each time that it was tried again."""
    log = (trial.parent.parent / "logs" / f"{trial.name}.log").read_text()
    return re.findall(r"(?:going on|resuming) after step (\d+)", log)


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not is_time_field(name)} for row in rows]


def same_rows(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl", "decisions.jsonl", "completions.jsonl"):
        rows = [without_times(read_jsonl(folder / name)) for folder in (one, other)]
        for row in (*rows[0], *rows[1]):
            row.pop("generate_s", None)
        assert rows[0], name
        assert rows[0] == rows[1], name


# ---- two sweeps and what follows from them ----


def fails_once(prompts, completions, answer, **columns):
    """A fault that goes away: at the fifth batch of the first try, when step 3 is done; the first call evaluates."""
    fails_once.calls = getattr(fails_once, "calls", 0) + 1
    flag = Path(os.environ["OVERLAPRL_CACHE"]) / "failed-once"
    if fails_once.calls > 5 and not flag.exists():
        flag.touch()
        raise OSError("the disk was away")
    return [float(sum(map(ord, text)) % 3) for text in completions]


FLAKY = merged(BASE, grpo={"num_steps": 5}, task={"rewards": ["test_sweep_run:fails_once"]})


@pytest.fixture(scope="module")
def flaky(local_ray, tmp_path_factory):
    """A sweep of two trials with actors: one fails once and is tried again, one the machine has no room for."""
    folder = tmp_path_factory.mktemp("flaky")
    cases = [{"name": "flaky"}, {"name": "large", "grpo.clip_eps": 0.3, "resources.learner_gpu": 0.9}]
    with pytest.raises(RunError, match=r"^1 of 2 trials failed .* the same command tries them again$"):
        run(folder, base=FLAKY, search={"cases": cases}, tune={"max_failures": 1})
    return folder


def test_a_failed_trial_is_tried_again_from_its_checkpoint(flaky, tmp_path):
    """And is bit for bit the run of its configuration, here by the serial replay."""
    trial = flaky / "s" / "trials" / names(flaky / "s")["flaky"]
    assert resumed_after(trial) == ["2"]
    train_serially(load_config(trial / "config.yaml", {"output.dir": str(tmp_path / "alone")}))
    same_rows(trial, tmp_path / "alone")
    assert json.loads((trial / "summary.json").read_text())["status"] == "done"


def test_a_trial_without_room_is_refused_and_the_others_run(flaky):
    trial = flaky / "s" / "trials" / names(flaky / "s")["large"]
    assert "1.15 GPU in all, but there are 1" in (trial / "error.txt").read_text()
    assert yaml.safe_load((trial / "config.yaml").read_text())["resources"]["learner_gpu"] == 0.9
    assert not (trial / "metrics.jsonl").exists()


def test_more_seeds_run_only_the_new_trials_and_a_finished_sweep_runs_none(flaky, tmp_path, capsys):
    """Serial trials or not: a trial is named by its configuration. Every step and the last accuracy reach Tune."""
    shutil.copytree(flaky / "s", tmp_path / "s")
    first = times(tmp_path / "s")
    parts = {"base": FLAKY, "tune": {"serial": True}}
    run(tmp_path, seeds=[0, 1], **parts)
    said = capsys.readouterr().out
    assert "2 trials in" in said
    assert ", 1 finished before" in said
    assert said.count("] started ") == 1
    assert "[2/2] finished" in said
    assert {path: time for path, time in times(tmp_path / "s").items() if path in first} == first
    new = {path.parent.name for path in set(times(tmp_path / "s")) - set(first)}
    assert len(new) == 1
    trial = tmp_path / "s" / "trials" / new.pop()
    (result,) = (tmp_path / "s" / "tune").glob(f"*/{trial.name}-*/result.json")
    reported, evals = read_jsonl(result), read_jsonl(trial / "eval.jsonl")
    assert [row["step"] for row in reported] == [1, 2, 3, 4, 5, 5]  # the last one again, with the last evaluation
    assert [row["loss"] for row in reported[:5]] == [row["loss"] for row in read_jsonl(trial / "metrics.jsonl")]
    assert [reported[0]["eval/accuracy"], reported[-1]["eval/accuracy"]] == [row["accuracy"] for row in evals]

    before = times(tmp_path / "s")
    run(tmp_path, seeds=[0, 1], **parts)
    assert ", 2 finished before" in capsys.readouterr().out
    assert times(tmp_path / "s") == before
    assert len(list((tmp_path / "s" / "tune").iterdir())) == 2  # no third call of Tune


COUNTED = """
import os, pathlib, random, beside

def counted(prompts, completions, answer, **columns):
    beside.calls += 1
    pathlib.Path(os.environ["OVERLAPRL_CACHE"], "counted-pids").open("a").write(f"{os.getpid()}\\n")
    return [(len(text) + beside.calls + random.random()) % 3 for text in completions]
"""


def test_serial_trials_share_a_process_and_nothing_else(local_ray, tmp_path, monkeypatch):
    """A reward that counts its calls in a module beside its own, and draws: each trial is the run of a new process."""
    (tmp_path / "counted_reward.py").write_text(COUNTED)
    (tmp_path / "beside.py").write_text("calls = 0")
    monkeypatch.syspath_prepend(tmp_path)
    pids = Path(os.environ["OVERLAPRL_CACHE"]) / "counted-pids"
    base = merged(BASE, task={"rewards": ["counted_reward:counted"]}, grpo={"num_steps": 2})
    run(tmp_path, base=base, tune={"serial": True, "max_concurrent": 1}, seeds=[0, 1, 2])
    assert len(set(pids.read_text().split())) == 1
    trials = sorted((tmp_path / "s" / "trials").iterdir())
    assert len(trials) == 3
    for trial in trials:
        train_serially(load_config(trial / "config.yaml", {"output.dir": str(tmp_path / "alone" / trial.name)}))
        assert "beside" not in sys.modules
        same_rows(trial, tmp_path / "alone" / trial.name)
        assert all(0 < row["time/step"] < 60 for row in read_jsonl(trial / "metrics.jsonl"))


def kills_its_process(prompts, completions, answer, **columns):
    """What the out-of-memory killer does, at the second batch (the first call is the evaluation)."""
    import signal

    kills_its_process.calls = getattr(kills_its_process, "calls", 0) + 1
    if kills_its_process.calls > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(i % 2) for i in range(len(completions))]


def test_failed_trials_are_rows_with_their_error_and_the_others_finish(local_ray, tmp_path, capsys):
    """Through the script: the table of all trials first, then one line about those that failed."""
    cases = [
        {"name": "well"},
        {"name": "killed", "task.rewards": ["test_sweep_run:kills_its_process"]},
        # weights grow by a factor of a million per update, four times per step
        {"name": "not finite", "grpo.weight_decay": 1e6, "grpo.lr": 1.0, "grpo.num_minibatches": 4,
         "staleness.rule": "none"},
        {"name": "invalid", "grpo.num_minibatches": 5},
    ]  # fmt: skip
    path, folder = write(tmp_path, search={"cases": cases}), tmp_path / "s"
    with pytest.raises(RunError, match=r"^2 of 3 trials failed .* the same command tries them again$") as raised:
        script(path, "--dir", folder, "--serial")
    assert raised.value.exit_code == 1
    said = capsys.readouterr().out
    assert "dropped 1 (invalid: grpo.num_minibatches=5): " in said
    trials, case = trials_of(folder), names(folder)
    errors = trials.set_index(trials.index.map({trial: name for name, trial in case.items()}))["error"]
    assert trials.loc[case["well"], "status"] == "done"
    assert pd.isna(errors["well"])
    assert "the trial's process ended" in errors["killed"]
    assert "step 1: the gradient's norm is nan" in errors["not finite"]
    assert set(trials.loc[[case["killed"], case["not finite"]], "status"]) == {"error"}
    assert "3 runs" in (folder / "report.md").read_text()
    assert said.index("[3/3]") < said.index("tables: ")
    history = pd.read_parquet(folder / "history.parquet")
    assert history[history["trial"] == case["well"]]["step"].tolist() == [1, 2, 3, 4]


# ---- before anything starts ----


def test_a_folder_serves_one_sweep_at_a_time(local_ray, tmp_path):
    from filelock import FileLock

    (tmp_path / "s").mkdir()
    with FileLock(tmp_path / "s" / ".lock"), pytest.raises(ConfigError, match="another sweep is running there"):
        run(tmp_path)
    assert [path.name for path in (tmp_path / "s").iterdir() if path.name != "trials"] == [".lock"]


def test_nothing_starts_where_no_trial_can_run(local_ray, tmp_path):
    with pytest.raises(ConfigError, match=r"trial \(task.rewards=\['nosuch'\]\).*nosuch"):
        run(tmp_path, search={"task.rewards": {"grid": [["gsm8k"], ["nosuch"]]}})
    with pytest.raises(ConfigError, match=r"no room for any trial: .*but there are 1"):
        run(tmp_path, base=merged(BASE, resources={"learner_gpu": 0.9}))
    assert not list((tmp_path / "s").glob("trials/*"))


# ---- minutes long ----


def slow(prompts, completions, answer, **columns):
    """A reward that takes its time."""
    time.sleep(0.3)
    return [float(i % 2) for i in range(len(completions))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("learner", "together"), [(0.2, True), (0.35, False)])
def test_two_small_trials_share_a_gpu_and_two_large_ones_do_not(local_ray, tmp_path, learner, together):
    """0.15 + 0.1 + 0.2 = 0.45 of the one (simulated) GPU each, or 0.6: seen in when they ran."""
    base = merged(BASE, task={"rewards": ["test_sweep_run:slow"]}, resources={"learner_gpu": learner},
                  grpo={"num_steps": 10})  # fmt: skip
    run(tmp_path, base=base, search={"seed": {"grid": [0, 1]}})
    assert statuses(tmp_path / "s") == 2 * [("done", 10)]
    starts, ends = times(tmp_path / "s", "config.yaml").values(), times(tmp_path / "s", "summary.json").values()
    assert (max(starts) < min(ends)) == together


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_optuna_and_asha_search_for_real_and_resume_where_they_were_cut(local_ray, tmp_path):
    """Six proposals of Optuna, all valid, of which ASHA ends some early; calling again runs nothing."""
    search = {"grpo.lr": {"loguniform": [1e-4, 1e-2]}, "staleness.kl_fresh": {"uniform": [0.01, 0.3]},
              "staleness.kl_stale": {"uniform": [0.02, 0.3]}, "pipeline.lag": {"randint": [0, 3]},
              "grpo.num_minibatches": {"choice": [1, 2]}}  # fmt: skip
    tune = {"search_algorithm": "optuna", "scheduler": "asha", "samples": 6, "metric": "reward", "serial": True,
            "asha_grace_steps": 2, "asha_reduction": 2, "max_concurrent": 2}  # fmt: skip
    base = merged(BASE, grpo={"num_steps": 8, "lr_warmup_steps": 0}, pipeline={"mode": "staleness"})
    run(tmp_path, base=base, search=search, tune=tune)
    ends = statuses(tmp_path / "s")
    assert len(ends) == 6
    assert {status for status, _ in ends} == {"done", "interrupted"}
    assert all((steps == 8) == (status == "done") and steps >= 2 for status, steps in ends)
    configs = [load_config(path) for path in (tmp_path / "s").glob("trials/*/config.yaml")]
    assert len({config.grpo.lr for config in configs}) == 6
    assert all(config.staleness.kl_fresh < config.staleness.kl_stale for config in configs)
    before = times(tmp_path / "s", "metrics.jsonl")
    run(tmp_path, base=base, search=search, tune=tune)
    assert times(tmp_path / "s", "metrics.jsonl") == before
    with pytest.raises(ConfigError, match="holds a search with other settings"):
        run(tmp_path, base=base, search=search, tune={**tune, "samples": 7})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trial_that_reaches_its_aim_is_stopped_for_good(local_ray, tmp_path, capsys):
    """And its process takes the next one."""
    tune = {"serial": True, "max_concurrent": 1, "stop": {"step": 3}}
    parts = {"base": merged(BASE, grpo={"num_steps": 50}), "tune": tune, "seeds": [0, 1]}
    run(tmp_path, **parts)
    for status, steps in statuses(tmp_path / "s"):
        assert status == "interrupted"
        assert steps in (3, 4)
    before = times(tmp_path / "s", "metrics.jsonl")
    assert len(before) == 2
    run(tmp_path, **parts)
    assert ", 2 finished before" in capsys.readouterr().out
    assert times(tmp_path / "s", "metrics.jsonl") == before
