"""scripts/gpu_check.sh: skips without a GPU, its rehearsal goes through every part, and no part stops the next one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from overlaprl_ray.workers.memory import memory_gb

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from gpu_check import PARTS, collect  # noqa: E402


def call(*arguments, timeout=500, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
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
    done = call("--cpu", out, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "gpu_check.json").read_text())
    modes = [(row["mode"], row["mps"]) for row in found["modes"]]
    assert modes == [
        *((mode, False) for mode in ("sync", "async", "staleness", "overlap")),
        ("sync", True),
        ("overlap", True),
    ]
    assert all(row["steps_per_s"] > 0 and row["efficiency"] > 0 for row in found["modes"])
    assert found["engines"]["engine-hf"]["tokens_per_s"] > 0
    assert found["engines"]["engine-hf"]["mean_difference"] < 1e-4
    assert all(row["publish_s"] > 0 for row in found["modes"])
    assert found["recovery"]["restarts"] == 1
    assert found["recovery"]["exact"]
    assert [row["arm"] for row in found["trl"]] == ["trl, 1 thread(s)"]
    assert found["without_result"].keys() <= {"engine-vllm"}
    assert "speed_up: " in done.stdout
    again = call("--cpu", out)
    assert again.returncode == 2
    assert "give a new folder" in again.stderr


def test_a_part_that_fails_says_why_and_the_next_ones_go_on(tmp_path):
    """With a Python that refuses whatever has work to do."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *" model "*) exit 0;; *" report "*) exec {sys.executable} "$@";;\n'
        "*compare_trl*) echo error: no TRL; exit 2;; *) echo error: out of memory; exit 1;; esac\n"
    )
    python.chmod(0o755)
    done = call("--cpu", tmp_path / "out", PYTHON=str(python))
    assert done.returncode == 1
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    failed = {name: f"failed: error: out of memory, see {name}.log" for name in PARTS if name != "trl"}
    assert found["without_result"] == {**failed, "trl": "skipped: error: no TRL"}
    assert found["checks"]["no part failed"] is found["checks"]["all four modes ran"] is False
    assert found["checks"]["each process is within its share"] is None


def benchmark(folder, modes, learner_gb):
    """A benchmark's file with what the report reads of it."""
    folder.mkdir()
    row = {"step_s": 0.5, "speed_up": 1.5, "efficiency": 0.9, "tokens_per_s": 10.0, "overlap_fraction": 0.5}
    run = {"memory/generator_gb": 2.0, "memory/reference_gb": 1.0, "memory/learner_gb": learner_gb}
    found = {
        "config": {"resources": {"generator_gpu": 0.25, "reference_gpu": 0.15, "learner_gpu": 0.5}},
        "modes": [{"label": mode, **row, "stages": {"publish": 0.125}} for mode in modes],
        "runs": [{"mode": mode, **run} for mode in modes],
    }
    (folder / "benchmark.json").write_text(json.dumps(found))


def test_memory_on_a_gpu_is_what_its_driver_counts_for_this_process(monkeypatch):
    clients = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=3_000_000_000), SimpleNamespace(pid=1, usedGpuMemory=9)]
    for name, answer in {"Init": None, "DeviceGetCount": 2, "DeviceGetHandleByIndex": 0,
                         "DeviceGetComputeRunningProcesses": clients}.items():  # fmt: skip
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda *_, answer=answer: answer)
    assert memory_gb(torch.device("cuda")) == 6.0
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2_500_000_000)
    clients.pop(0)
    assert memory_gb(torch.device("cuda")) == 2.5


def test_the_report_has_every_part_and_holds_memory_to_each_actors_share(tmp_path):
    benchmark(tmp_path / "plain", ["sync", "async", "staleness", "overlap"], learner_gb=5.0)
    benchmark(tmp_path / "mps", ["sync", "overlap"], learner_gb=5.0)
    (tmp_path / "engine-vllm.json").write_text(json.dumps({"tokens_per_s": 4000.0}))
    (tmp_path / "recovery.json").write_text(json.dumps({"restarts": 1, "seconds": 20.0, "exact": False}))
    found = collect(tmp_path, 24.0, 100.0)
    assert [row["mps"] for row in found["modes"]] == [False] * 4 + [True] * 2
    assert found["modes"][3]["steps_per_s"] == 2.0
    assert found["engines"] == {"engine-vllm": {"tokens_per_s": 4000.0}}
    assert [(row["actor"], row["cap_gb"]) for row in found["memory"]] == [
        ("generator", 6.0), ("reference", pytest.approx(3.6)), ("learner", 12.0)]  # fmt: skip
    assert all(found["checks"].values())
    assert [row["within"] for row in collect(tmp_path, 9.0, 100.0)["memory"]] == [True, True, False]
    (tmp_path / "engine-hf.txt").write_text("skipped: no time left\n")
    late = collect(tmp_path, 24.0, 600.0)
    assert late["without_result"] == {"engine-hf": "skipped: no time left"}
    assert [late["checks"][name] for name in ("no part failed", "under 480 s")] == [True, False]
