"""From a command to the first training step: which modules are imported where, and how long that takes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).resolve().parents[1] / "scripts" / "train.py")
HEAVY = {"torch", "transformers", "pandas", "matplotlib", "scipy", "datasets", "sklearn", "ray"}
RAY = "import ray, time; t = time.time(); ray.init(log_to_driver=False, logging_level=40); print(time.time() - t)"
EVENTS = "from pathlib import Path; from overlaprl_ray.runs.loggers import tensorboard; tensorboard(Path('x'))"
MODEL = "import torch; from transformers import LlamaForCausalLM"


@pytest.mark.parametrize(
    ("lines", "allowed"),
    [
        ("import overlaprl_ray", set()),
        ("from overlaprl_ray import ExperimentConfig, train", {"ray"}),
        (
            "from pathlib import Path; from overlaprl_ray.runs.loggers import tensorboard; tensorboard(Path('x'))",
            {"ray"},
        ),
        (f"import runpy; sys.argv = ['train.py', '--dry-run']; runpy.run_path({SCRIPT!r}, run_name='__main__')", set()),
    ],
    ids=["configuration", "train", "TensorBoard", "dry run"],
)
def test_a_driver_imports_nothing_heavy(tmp_path: Path, lines: str, allowed: set[str]) -> None:
    report = f"import atexit, sys; atexit.register(lambda: print('HEAVY', *({HEAVY} & set(sys.modules))))\n{lines}"
    command = [sys.executable, "-c", report]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert set(out.rpartition("HEAVY")[2].split()) <= allowed


@pytest.mark.slow
def test_seconds_to_the_first_step(tmp_path: Path) -> None:
    """At most 1.2 times what cannot be avoided: Ray's start, and three imports of the model's code on two cores.

    Run it on a quiet machine: pytest -m slow -s tests/test_start.py
    """
    ratios = []
    for repeat in range(3):
        floor = float(subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, check=True).stdout)
        started = time.time()
        imports = [subprocess.Popen([sys.executable, "-c", MODEL]) for _ in range(3)]
        assert not any(process.wait() for process in imports)
        floor += time.time() - started
        run = tmp_path / f"run{repeat}"
        command = [sys.executable, SCRIPT, "--grpo.num_steps", "10", "--output.dir", str(run)]
        started = time.time()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while not (run / "metrics.jsonl").exists():
                assert process.poll() is None
                time.sleep(0.02)
            seconds = time.time() - started
        ratios.append(seconds / floor)
        print(f"floor {floor:.1f} s, first step after {seconds:.1f} s: {seconds / floor:.2f}")
    assert sorted(ratios)[1] <= 1.2
