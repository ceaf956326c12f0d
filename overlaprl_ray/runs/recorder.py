"""Writes a run's folder, each row as it happens, so that a run cut short can still be read.

recorder = Recorder(folder, config, cores=2)
recorder.step(result); recorder.evaluation(evaluation); recorder.summary(status="done")
"""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Span
from overlaprl_ray.runs.discard_report import discard_report
from overlaprl_ray.runs.environment import environment
from overlaprl_ray.runs.files import as_json, cut_back, replace_text, writing
from overlaprl_ray.runs.gantt import figure_of
from overlaprl_ray.runs.notices import notices
from overlaprl_ray.runs.summary import WARM_UP, summarize
from overlaprl_ray.runs.timeline import EvaluationSpan, StepSpans, Timeline, write_trace
from overlaprl_ray.workers.metrics import Evaluation, StepResult


def is_time_field(name: str) -> bool:
    """Whether a metric depends on the clock or the machine's state, and so may differ between equal runs."""
    return name in ("wall_s", "tokens_per_s") or name.startswith(("time/", "memory/"))


def default_folder(config: ExperimentConfig) -> Path:
    """runs/<time>-<model>-<mode>-s<seed>, relative to where the run is started."""
    model = Path(config.grpo.model_name).name
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{config.pipeline.mode}-s{config.seed}"


class Recorder:
    """Turns step results into rows with times, and writes everything but the model."""

    def __init__(self, folder: Path, config: ExperimentConfig, cores: int | None, resume_from: int | None = None):
        """`resume_from`: the step whose checkpoint this run continues from; the folder's files are cut back to it."""
        self.folder, self.config, self.cores = folder, config, cores
        self.started = time.time()
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[Evaluation] = []
        self.decisions: list[dict[str, Any]] = []
        self.spans: list[StepSpans] = []
        self.floor: float | None = None
        self.faults = self.restarts = 0
        settings = config.model_dump(mode="json")
        settings["output"]["dir"] = None  # so that the file can be given to a new run as it is
        with writing(folder):
            if resume_from is None:
                self._claim(yaml.safe_dump(settings, sort_keys=False))
            else:
                replace_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))  # num_steps may differ
                self._cut_back(resume_from)

    def _claim(self, settings: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self.folder / "config.yaml").open("x", encoding="utf-8") as file:
                file.write(settings)
        except FileExistsError:
            raise RunError(f"output.dir = '{self.folder}': another run took it first; give a new folder") from None
        (self.folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")

    def _cut_back(self, step: int) -> None:
        (self.folder / "summary.json").unlink(missing_ok=True)  # of the interrupted run
        self.rows = cut_back(self.folder / "metrics.jsonl", step)
        self.decisions = cut_back(self.folder / "decisions.jsonl", step)
        cut_back(self.folder / "completions.jsonl", step)
        cut_back(self.folder / "faults.jsonl", step)
        if [row["step"] for row in self.rows] != list(range(1, step + 1)):
            raise RunError(f"'{self.folder}/metrics.jsonl' lacks rows up to step {step}; the run cannot be resumed")
        # this very step is evaluated again: the run may have ended before its evaluation
        past = cut_back(self.folder / "eval.jsonl", step - 1)
        self.evaluations = [Evaluation(**row, span=(0.0, 0.0)) for row in past]
        self.faults = sum(row["faults"] for row in self.rows)
        if self.rows:
            self.started -= self.rows[-1]["wall_s"]

    def step(self, result: StepResult) -> dict[str, Any]:
        """Complete a step's row with totals and times, and write it; returns the row."""
        last = self.rows[-1] if self.rows else {"tokens": 0, "samples": 0}
        metrics, times = dict(result.metrics), self._times(result.spans)
        tokens, waited = metrics.pop("tokens"), metrics.pop("time/generator_wait", 0.0)  # in the middle of a batch
        times["time/generate"] -= waited
        times["time/generator_wait"] += waited
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
        step, seconds = row["step"], times["time/generate"]
        decisions = {"step": step, "lag": row["staleness/lag"], "generate_s": seconds, "cells": result.cells}
        self.rows.append(row)
        self.decisions.append(decisions)
        self.spans.append(StepSpans(step, result.weights_step, row["version"], row["staleness/decision"], result.spans))
        self.floor = result.floor
        self._append("metrics.jsonl", row)
        self._append("decisions.jsonl", decisions)
        for sample in result.samples:
            self._append("completions.jsonl", sample)
        if result.fault:
            self.faults += 1
            self._append("faults.jsonl", {"step": step, "fault": result.fault})
        return row

    def evaluation(self, done: Evaluation) -> None:
        """Write one held-out evaluation."""
        self.evaluations.append(done)
        row = {"step": done.step, "version": done.version, "accuracy": done.accuracy, "n": done.n}
        self._append("eval.jsonl", row)

    def summary(self, status: str) -> dict[str, Any]:
        """Write summary.json and the timeline; returns the summary."""
        result = summarize(self.config, self.rows, self.evaluations, time.time() - self.started, status, self.cores)
        evaluations = [EvaluationSpan(e.step, e.version, e.span) for e in self.evaluations if e.span[1] > self.started]
        mode, lag, seed = self.config.pipeline.mode, self.config.lag, self.config.seed
        timeline = Timeline(mode, lag, seed, WARM_UP, self.started, self.spans, evaluations)
        result |= {
            "staleness_floor": self.floor,
            "faults": self.faults,
            "restarts": self.restarts,
            "notices": notices(self.config, self.floor, result["decisions"]),
            "thrown_away": discard_report(self.decisions),
            "overlap_fraction": timeline.overlap_fraction,
        }
        with writing(self.folder):
            if timeline.steps:
                write_trace(self.folder / "timeline.json", timeline)
                figure_of({mode: timeline}).savefig(self.folder / "timeline.png")
            replace_text(self.folder / "summary.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
        return result

    def _times(self, spans: dict[str, Span]) -> dict[str, Any]:
        """Seconds of each stage, waits between them, and the step's own time with evaluations taken out."""
        before = self.spans[-1].spans if self.spans else None
        ended = before["train"][1] if before else spans["load"][0]
        learner_gap = (before.get("publish", before["train"])[1] if before else ended, spans["train"][0])
        generator_gap = (before["generate"][1] if before else spans["load"][0], spans["load"][0])
        evaluated = [evaluation.span for evaluation in self.evaluations]
        paused = _overlap(learner_gap, evaluated)  # the learner had to wait for an evaluation
        published = _length(spans["publish"]) if "publish" in spans else 0.0  # a serial run publishes nothing
        return {
            "time/generate": _length(spans["generate"]),
            "time/reference": _length(spans["reference"]) if "reference" in spans else None,
            "time/train": _length(spans["train"]),
            "time/weights": _length(spans["load"]) + published,
            "time/publish": published,
            "time/learner_wait": max(0.0, _length(learner_gap) - paused),
            "time/generator_wait": max(0.0, _length(generator_gap) - _overlap(generator_gap, evaluated)),
            "time/step": spans["train"][1] - ended - paused,
        }

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with writing(self.folder), (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(as_json(row) + "\n")


def _length(span: Span) -> float:
    return span[1] - span[0]


def _overlap(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
