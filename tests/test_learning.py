"""The built-in default, as a newcomer runs it, really learns."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_jsonl

from overlaprl_ray.config.cli import parse_command_line
from overlaprl_ray.reports.cli import parse_report_command
from overlaprl_ray.tune.cli import parse_sweep_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_the_default_run_learns(tmp_path, seed):
    """The script itself, with a Ray of its own: exit code 0, accuracy and reward up by 0.10, a log without codes."""
    folder = tmp_path / "run"
    command = [sys.executable, ROOT / "scripts" / "train.py", "--output.dir", folder, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mode"] == "overlap"
    assert summary["accuracy_final"] - summary["accuracy_start"] >= 0.10
    assert summary["reward_last_10"] - summary["reward_first_10"] >= 0.10
    evaluations = read_jsonl(folder / "eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 50, 100, 150, 200, 250]
    assert all(row["n"] >= 256 for row in evaluations)
    assert "\x1b" not in done.stdout
    assert f"{summary['accuracy_final']:.3f}" in done.stdout
    assert str(folder) in done.stdout
    assert not done.stderr


def parse(script: str, argv: list[str]) -> None:
    """Read a command line as the script does; wrong options and values raise."""
    if script == "sweep.py":
        parse_sweep_command(argv)
    elif script == "report.py":
        parse_report_command(argv)
    else:
        module = importlib.import_module(script.removesuffix(".py"))
        parse_command_line(script, "", argv, module.options)


def test_every_command_in_the_readme_is_understood(monkeypatch):
    """Options and files that README names exist and take the values it gives."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.removeprefix("PYTHONPATH=. ").split(" #")[0] for line in text.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("python scripts/")]
    seen = [Path(command[0]).name for command in commands]
    assert set(seen) == {"train.py", "benchmark.py", "sweep.py", "report.py", "bench_peers.py"}
    assert seen.count("train.py") >= 5
    for script, command in zip(seen, commands, strict=True):
        assert Path(command[0]).exists()
        if "--resume" not in command:  # which needs a run's folder: test_storage.py
            parse(
                script, [word.replace("runs/x/config.yaml", "scripts/configs/gpu_check.yaml") for word in command[1:]]
            )
