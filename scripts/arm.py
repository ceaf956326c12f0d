"""One side of a comparison in a process of its own, its memory watched from outside; and this project's side of it.

track = measure(Job("overlap", 1, None, config), Path("runs/x/r1-0"))
python scripts/arm.py runs/x/r1-0/job.json     # what it starts
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import run_script
from overlaprl_ray.errors import RunError
from overlaprl_ray.runs.files import read_rows

PERIOD_S, LIMIT_S = 0.25, 12 * 3600.0
SAME = ("reward", "loss", "tokens")  # of the timed and the evaluated run


@dataclass(frozen=True)
class Job:
    """One arm's run: `arm` is one of our modes, or trl."""

    arm: str
    threads: int
    bf16: str | None
    config: ExperimentConfig
    every: int | None = None
    target: float | None = None
    seconds: float | None = None  # trl: train for so long instead of grpo.num_steps

    @property
    def label(self) -> str:
        """As the table calls it."""
        return f"{self.arm}, {self.threads} thread(s){f', bf16 {self.bf16}' if self.bf16 else ''}"


def changed(config: ExperimentConfig, **groups: dict[str, Any]) -> ExperimentConfig:
    """The configuration with some settings of some groups replaced."""
    parts = {name: getattr(config, name).model_copy(update=values) for name, values in groups.items()}
    return config.model_copy(update=parts)


def run_own(job: Job, folder: Path) -> dict[str, Any]:
    """A run as `train` makes it, timed without evaluations; once more with them where they are wanted."""
    from rich.console import Console

    from overlaprl_ray.runs.timeline import spans_of
    from overlaprl_ray.runtime.train import ray_running, train

    def rows(name: str, every: int) -> list[dict[str, Any]]:
        quiet = {"checkpoint_every": 0, "completions_every": 0, "tensorboard": False, "save_final": False}
        output = {"dir": str(folder / name), "eval_every": every, **quiet}
        run = changed(job.config, pipeline={"mode": job.arm}, resources={"threads": job.threads}, output=output)
        train(run, Console(quiet=True))
        return read_rows(folder / name / "metrics.jsonl")

    evaluations = []
    with ray_running():
        timed = rows("timed", 0)
        if job.every:
            for row, other in zip(timed, rows("evaluated", job.every), strict=True):
                if [row[name] for name in SAME] != [other[name] for name in SAME]:
                    raise RunError(f"step {row['step']}: the evaluated run is not the timed one; use schedule exact")
            evaluations = [(e["step"], e["accuracy"]) for e in read_rows(folder / "evaluated" / "eval.jsonl")]
    trace = json.loads((folder / "timed" / "timeline.json").read_text(encoding="utf-8"))
    spans = list(spans_of(trace).values())
    tokens = [row["tokens"] for row in timed]
    return {
        "ends": [span["train"][1] - spans[0]["load"][0] for span in spans],
        "tokens": [now - before for now, before in zip(tokens, [0, *tokens], strict=False)],
        "rewards": [row["reward"] for row in timed],
        "evaluations": evaluations,
    }


def main(argv: list[str]) -> None:
    """Do the job in a file, beside which its track is left."""
    path = Path(argv[0])
    values = json.loads(path.read_text(encoding="utf-8"))
    job = Job(**{**values, "config": ExperimentConfig.model_validate(values["config"])})
    if job.arm == "trl":
        from trl_arm import run_trl

        track = run_trl(job)
    else:
        track = run_own(job, path.parent)
    (path.parent / "track.json").write_text(json.dumps(track), encoding="utf-8")


def measure(job: Job, folder: Path) -> dict[str, Any]:
    """Do a job in a fresh process; its track, with the peak memory of all its processes. `RunError` where it fails."""
    folder.mkdir(parents=True)
    values = {**vars(job), "config": job.config.model_dump(mode="json")}
    (folder / "job.json").write_text(json.dumps(values), encoding="utf-8")
    threads = {"OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads), "RAY_ADDRESS": "local"}
    command = [sys.executable, __file__, str(folder / "job.json")]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **threads})
        try:
            peak = _peak_memory(child, job.label)
        finally:
            child.terminate()  # nothing where it has ended; when we are interrupted it must not go on alone
    if child.wait():
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunError(f"{job.label}: {(lines or ['no output'])[-1].removeprefix('error: ')}; see {folder}/log.txt")
    track: dict[str, Any] = json.loads((folder / "track.json").read_text(encoding="utf-8"))
    return {**track, "memory_gb": peak}


def _peak_memory(child: subprocess.Popen[bytes], label: str) -> float:
    """Until the child ends: the largest sum, GB, of PSS over its tree, which counts a shared page once."""
    import psutil

    root, deadline, peak = psutil.Process(child.pid), time.monotonic() + LIMIT_S, 0.0
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise RunError(f"{label}: timed out after {LIMIT_S / 3600:g} hours; give it fewer steps")
        total = 0
        with contextlib.suppress(psutil.Error):  # one ended between listing and reading
            for process in [root, *root.children(recursive=True)]:
                total += process.memory_full_info().pss
        peak = max(peak, total / 1e9)
        time.sleep(PERIOD_S)
    return peak


if __name__ == "__main__":
    run_script(main)
