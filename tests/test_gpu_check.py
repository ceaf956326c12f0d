"""scripts/gpu_check.sh: skips without a GPU, and its rehearsal goes through every step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from gpu_check import collect, memory_rows, table  # noqa: E402


def call(*arguments, timeout=500):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [ROOT / "scripts" / "gpu_check.sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_skips_with_a_reason(tmp_path):
    done = call(tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: torch")
    assert "no GPU" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rehearsal(tmp_path, cache):
    out = tmp_path / "out"
    done = call("--cpu", out)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "gpu_check.json").read_text())
    assert [row["mode"] for row in found["modes"]] == ["sync", "async", "staleness", "overlap"]
    assert all(row["step_s"] > 0 and row["efficiency"] > 0 for row in found["modes"])
    assert found["checks"]["all four modes ran"] is True
    assert found["mps_skipped"] == "a rehearsal without a GPU"
    assert Path(found["timeline"]).exists()
    assert "speed-up" in (out / "table.txt").read_text()
    again = call("--cpu", out)
    assert again.returncode == 2
    assert "give a new folder" in again.stderr


def benchmark(folder, modes, learner_gb):
    """A benchmark's file with what the report reads of it."""
    folder.mkdir()
    row = {"step_s": 1.0, "speed_up": 1.5, "efficiency": 0.9, "tokens_per_s": 10.0, "overlap_fraction": 0.5}
    run = {"memory/generator_gb": 2.0, "memory/reference_gb": 1.0, "memory/learner_gb": learner_gb}
    found = {
        "config": {"resources": {"generator_gpu": 0.25, "reference_gpu": 0.15, "learner_gpu": 0.5}},
        "environment": {"gpus": ["a GPU"], "cpu": "a CPU", "git_commit": "0123"},
        "modes": [{"label": mode, **row} for mode in modes],
        "runs": [{"mode": mode, **run} for mode in modes],
    }
    (folder / "benchmark.json").write_text(json.dumps(found))
    return found


def test_memory_is_held_to_each_actors_share(tmp_path):
    rows = memory_rows(benchmark(tmp_path / "plain", ["sync"], learner_gb=13.0), total_gb=24.0)
    assert [(row["actor"], row["cap_gb"], row["within"]) for row in rows] == [
        ("generator", 6.0, True), ("reference", pytest.approx(3.6), True), ("learner", 12.0, False)]  # fmt: skip


def test_report_with_and_without_mps(tmp_path):
    benchmark(tmp_path / "plain", ["sync", "async", "staleness", "overlap"], learner_gb=5.0)
    benchmark(tmp_path / "mps", ["sync", "overlap"], learner_gb=5.0)
    (tmp_path / "mps.txt").write_text("")
    found = collect(tmp_path, 24.0, 100.0)
    assert [row["mps"] for row in found["modes"]] == [False] * 4 + [True] * 2
    assert all(found["checks"].values())
    assert "learner    peak 5.0 GB of 12.0" in table(found)
    (tmp_path / "mps.txt").write_text("not installed\n")
    skipped = collect(tmp_path, 24.0, 600.0)
    assert len(skipped["modes"]) == 4
    assert "MPS skipped: not installed" in table(skipped)
    assert skipped["checks"]["under 480 s"] is False
