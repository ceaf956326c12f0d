"""Killing a run's processes at chosen moments, and asking whether the end is bit for bit that of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import yaml
from conftest import read_jsonl, small
from safetensors.torch import load_file

from overlaprl_ray.runs.recorder import is_time_field
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.train import train

TITLES = {
    "generator": ("ray::GeneratorActor", "ray::StreamActor"),
    "reference": "ray::ReferenceActor",
    "learner": ("ray::LearnerActor", "ray::StreamLearnerActor"),
}
ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "scripts" / "train.py"
# of a script's process: it imports this tree and the tests' reward functions, and joins no other Ray
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "RAY_ADDRESS": "local"}


def config_of(folder, mode="overlap", lag=2, steps=12, **groups):
    """A run of seconds in which all three staleness decisions occur, with a checkpoint every third step."""
    output = {"dir": str(folder), "checkpoint_every": 3, "eval_every": 4, "completions_every": 2}
    pipeline = {"mode": mode, "lag": lag, **groups.pop("pipeline", {})}
    grpo = {"num_steps": steps, "lr": 3e-3, **groups.pop("grpo", {})}
    staleness = {"kl_fresh": 1e-3, "kl_stale": 1e-2}
    task = {"rewards": ["dense_reward:restless"]}
    return small(grpo=grpo, pipeline=pipeline, output=output, staleness=staleness, task=task, **groups)


def oracle(config):
    """(metrics rows, evaluations, final weights) of the serial replay."""
    found = []
    rows, weights = replay(config, on_evaluation=lambda e: found.append((e.step, e.version, e.accuracy)))
    totals = {"tokens": 0, "samples": 0}
    for row in rows:
        for name in totals:
            totals[name] += row[name]
            row[name] = totals[name]
    return rows, found, weights


def outcome(folder):
    """The same of a run's folder."""
    rows = [{k: v for k, v in row.items() if not is_time_field(k)} for row in read_jsonl(folder / "metrics.jsonl")]
    evaluated = [(row["step"], row["version"], row["accuracy"]) for row in read_jsonl(folder / "eval.jsonl")]
    return rows, evaluated, load_file(folder / "final" / "model.safetensors")


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][name], expected[2][name]) for name in found[2])


def pids(title, root=None):
    """Processes of one actor class that descend from a process (default: this one)."""
    family = psutil.Process(root).children(recursive=True)
    found = []
    for process in family:
        try:
            if " ".join(process.cmdline()).startswith(title):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def kill_actor(role):
    """SIGKILL of the run's actors of a role; one that is just being restarted is left alone."""
    for pid in pids(TITLES[role]):
        os.kill(pid, signal.SIGKILL)


def run_killing(config, victims):
    """`train` with a SIGKILL of the roles `victims[step]` when that step's row is written; returns the summary."""

    def kill(row):
        for role in victims.get(row["step"], []):
            kill_actor(role)

    return train(config, on_row=kill)


def write_config(path, config):
    """A configuration as the file that scripts take."""
    values = config.model_dump(mode="json")
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def launch(*arguments, log):
    """scripts/train.py as a process of its own session."""
    command = [sys.executable, str(TRAIN), *map(str, arguments)]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )


def wait_until(condition, what, seconds=300.0):
    """Poll; fails naming what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)


AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # of a killed raylet they call a dead server for a minute


def wait_until_gone(family, seconds, but=()):
    """Wait for processes (psutil) to end, those named in `but` aside."""

    def left():
        found = []
        for process in family:
            try:
                if process.is_running() and process.status() != "zombie" and process.name() not in but:
                    found.append(process.name())
            except psutil.NoSuchProcess:
                continue
        return found

    deadline = time.monotonic() + seconds
    while names := left():
        assert time.monotonic() < deadline, f"still there after {seconds} s: {names}"
        time.sleep(0.05)


def rows_written(folder):
    """Whole rows of a run's metrics so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
