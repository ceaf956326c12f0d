"""The built-in default, as a newcomer runs it, really learns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_jsonl

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.ci), *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
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
