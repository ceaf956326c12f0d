"""A run's folder, and the rows in it: written as they happen, so that a run cut short is still readable.

recorder = Recorder(folder, config, cores=2)
recorder.step(result); recorder.evaluation(evaluation); recorder.summary(status="done")
"""

import json
import math
import os
import platform
import shutil
import subprocess
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from overlaprl_ray.actors import Evaluation
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.gantt import draw_gantt
from overlaprl_ray.metrics import StepResult
from overlaprl_ray.rollout import Span
from overlaprl_ray.summary import WARM_UP, summarize
from overlaprl_ray.timeline import EvaluationSpan, StepSpans, Timeline, write_trace

TIME_FIELDS = ("wall_s", "tokens_per_s")  # and all under time/ and memory/: what differs between equal runs


def is_time_field(name: str) -> bool:
    """Whether a metric depends on the clock or the machine's state, and so may differ between equal runs."""
    return name in TIME_FIELDS or name.startswith(("time/", "memory/"))


def default_folder(config: ExperimentConfig) -> Path:
    """runs/<time>-<model>-<mode>-s<seed>, relative to where the run is started."""
    model = Path(config.grpo.model_name).name
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{config.pipeline.mode}-s{config.seed}"


class Recorder:
    """Turns step results into rows with times, and writes everything but the model."""

    def __init__(self, folder: Path, config: ExperimentConfig, cores: int | None):
        self.folder, self.config, self.cores = folder, config, cores
        folder.mkdir(parents=True, exist_ok=True)
        settings = config.model_dump(mode="json")
        settings["output"]["dir"] = None  # the folder it lies in; the file can so be given again as it is
        try:
            with (folder / "config.yaml").open("x", encoding="utf-8") as file:
                yaml.safe_dump(settings, file, sort_keys=False)
        except FileExistsError:
            raise RunError(f"output.dir = '{folder}': another run took it meanwhile; give a new folder") from None
        (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
        self.started = time.time()
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[Evaluation] = []
        self.spans: list[StepSpans] = []
        self.floor: float | None = None

    def step(self, result: StepResult) -> dict[str, Any]:
        """Complete a step's row with totals and times, and write it; returns the row."""
        last = self.rows[-1] if self.rows else {"tokens": 0, "samples": 0}
        metrics = dict(result.metrics)
        tokens = metrics.pop("tokens")
        times = self._times(result.spans)
        row = {
            "step": metrics.pop("step"),
            "version": metrics.pop("version"),
            "wall_s": time.time() - self.started,
            "tokens": last["tokens"] + tokens,
            "samples": last["samples"] + metrics.pop("samples"),
            **metrics,
            **times,
            "tokens_per_s": tokens / times["time/step"] if times["time/step"] > 0 else None,
            **{f"memory/{actor}_gb": value for actor, value in result.memory_gb.items()},
        }
        self.rows.append(row)
        decision = row["staleness/decision"]
        self.spans.append(StepSpans(row["step"], result.weights_step, row["version"], decision, result.spans))
        self.floor = result.floor
        self._append("metrics.jsonl", row)
        for sample in result.samples:
            self._append("completions.jsonl", sample)
        return row

    def evaluation(self, done: Evaluation) -> None:
        """Write one held-out evaluation."""
        self.evaluations.append(done)
        row = {"step": done.step, "version": done.version, "accuracy": done.accuracy, "n": done.n}
        self._append("eval.jsonl", row)

    def summary(self, status: str) -> dict[str, Any]:
        """Write summary.json and the timeline; returns the summary."""
        found = summarize(self.config, self.rows, self.evaluations, time.time() - self.started, status, self.cores)
        found["staleness_floor"] = self.floor
        timeline = self._timeline()
        found["overlap_fraction"] = timeline.overlap_fraction
        scratch = self.folder / "summary.json.part"
        scratch.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(scratch, self.folder / "summary.json")  # present only when whole
        if timeline.steps:
            write_trace(self.folder / "timeline.json", timeline)
            draw_gantt(self.folder / "timeline.png", timeline)
        return found

    def _timeline(self) -> Timeline:
        return Timeline(
            mode=self.config.pipeline.mode,
            lag=self.config.lag,
            seed=self.config.seed,
            warm_up=WARM_UP,
            started=self.started,
            steps=self.spans,
            evaluations=[EvaluationSpan(done.step, done.version, done.span) for done in self.evaluations],
        )

    def _times(self, spans: dict[str, Span]) -> dict[str, Any]:
        """Seconds of each stage, waits between them, and the step's own time with evaluations taken out."""
        before = self.spans[-1].spans if self.spans else None
        idle_from = before["train"][1] if before else spans["load"][0]
        evaluated = [e.span for e in self.evaluations]
        waited = _overlap((idle_from, spans["train"][0]), evaluated)  # the learner stood still for an evaluation
        generator_from = before["generate"][1] if before else spans["load"][0]
        generator_gap = (generator_from, spans["load"][0])
        reference = spans.get("reference")
        return {
            "time/generate": _length(spans["generate"]),
            "time/reference": _length(reference) if reference else None,
            "time/train": _length(spans["train"]),
            "time/weights": _length(spans["load"]),
            "time/learner_wait": max(0.0, spans["train"][0] - idle_from - waited),
            "time/generator_wait": max(0.0, _length(generator_gap) - _overlap(generator_gap, evaluated)),
            "time/step": spans["train"][1] - idle_from - waited,
        }

    def _append(self, name: str, row: dict[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n")


def _length(span: Span) -> float:
    return span[1] - span[0]


def _overlap(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def environment() -> dict[str, Any]:
    """Versions, hardware and commit: what a figure must be read with."""
    packages = ("overlaprl_ray", "torch", "transformers", "datasets", "ray", "numpy", "pandas")
    return {
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git_commit": git_commit(Path(__file__).parent.parent),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def git_commit(root: Path) -> str | None:
    """The commit of a checkout, with "-dirty" where tracked files differ; None for an installed package."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "HEAD") + dirty or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else platform.processor()
