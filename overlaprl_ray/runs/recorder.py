"""Writes a run's folder, each row as it happens, so that a run cut short can still be read, and tells who listens.

recorder = Recorder(folder, config, cores=2, environment=environment, progress=Progress(200))
recorder.add_step(result); recorder.add_evaluation(evaluation); recorder.finish(status="done")
"""

import dataclasses
import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Span
from overlaprl_ray.runs.files import as_json, cut_back, last_step, replace_text, writing
from overlaprl_ray.runs.gantt import figure_of
from overlaprl_ray.runs.loggers import RunLoggers
from overlaprl_ray.runs.notices import floor_notice, notices, signal_notice
from overlaprl_ray.runs.progress import Progress
from overlaprl_ray.runs.summary import discard_report, summarize
from overlaprl_ray.runs.timeline import trace_of
from overlaprl_ray.workers.results import Evaluation, StepResult

OnRow = Callable[[dict[str, Any]], None]


def is_time_field(name: str) -> bool:
    """Whether a metric depends on the clock or the machine's state, and so may differ between equal runs."""
    return name in ("wall_s", "tokens_per_s") or name.startswith(("time/", "memory/"))


def default_folder(config: ExperimentConfig) -> Path:
    """runs/<time>-<model>-<mode>-s<seed>, relative to where the run is started."""
    model = Path(config.grpo.model_name).name
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{config.pipeline.mode}-s{config.seed}"


class Recorder:
    """Turns step results into rows with times, writes everything but the model, and passes rows on."""

    def __init__(
        self,
        folder: Path,
        config: ExperimentConfig,
        cores: int | None,
        environment: Callable[[], dict[str, Any]],
        progress: Progress,
        on_row: OnRow | None = None,
        resume_from: int | None = None,
    ):
        """`resume_from`: the step that the run in this folder continues after: its files are cut back to it.

        `environment` tells where the run computes; it is asked once there is a number to be read with it.
        """
        self.folder, self.config, self.cores, self.environment = folder, config, cores, environment
        self.progress, self.on_row = progress, on_row
        self.started = time.time()
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[Evaluation] = []
        self.decisions: list[dict[str, Any]] = []
        self.results: list[StepResult] = []  # of this process, without their samples
        self.floor: float | None = None
        self.faults = self.restarts = 0
        settings = config.model_dump(mode="json")
        settings["output"]["dir"] = None  # so that the file can be given to a new run as it is
        text = yaml.safe_dump(settings, sort_keys=False)
        with writing(folder):
            if resume_from is None:
                self._claim(text)
            else:
                replace_text(folder / "config.yaml", text)  # num_steps may differ
                self._cut_back(resume_from)
        self.loggers = RunLoggers(config, folder, self.rows[-1] if self.rows else None)

    def _claim(self, settings: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self.folder / "config.yaml").open("x", encoding="utf-8") as file:
                file.write(settings)
        except FileExistsError:
            raise RunError(f"output.dir = '{self.folder}': another run took it first; give a new folder") from None

    def _cut_back(self, step: int) -> None:
        """Drop what was written after a step, which is done again: its state is not kept."""
        (self.folder / "summary.json").unlink(missing_ok=True)  # of the interrupted run
        names = ("metrics", "decisions", "completions", "faults")
        written = last_step(self.folder / "metrics.jsonl")
        self.rows, self.decisions, *_ = (cut_back(self.folder / f"{name}.jsonl", step) for name in names)
        if written > step:
            reason = f"the newest checkpoint to use is of step {step}" if step else "there is no checkpoint to use"
            self.progress.say(f"dropped {written - step} rows, of steps {step + 1} to {written}: {reason}")
        if [row["step"] for row in self.rows] != list(range(1, step + 1)):
            raise RunError(f"'{self.folder}/metrics.jsonl' lacks rows up to step {step}; the run cannot be resumed")
        # this very step is evaluated again: the run may have ended before its evaluation
        past = cut_back(self.folder / "eval.jsonl", step - 1)
        self.evaluations = [Evaluation(**row, span=(0.0, 0.0)) for row in past]
        self.faults = sum(row["faults"] for row in self.rows)
        if self.rows:
            self.started -= self.rows[-1]["wall_s"]

    @property
    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by step, as far as it is known."""
        return {done.step: done.accuracy for done in self.evaluations}

    def add_step(self, result: StepResult, waiting: int = 0) -> dict[str, Any]:
        """Write a finished step's row and pass it on; `waiting` rollouts exist that are not trained on yet."""
        row = self._row(result)
        decisions = {"step": result.step, "lag": row["staleness/lag"], "generate_s": row["time/generate"]}
        self.rows.append(row)
        self.decisions.append({**decisions, "cells": result.cells})
        self.results.append(dataclasses.replace(result, samples=[]))
        self.floor = result.floor
        self._append("metrics.jsonl", row)
        self._append("decisions.jsonl", self.decisions[-1])
        for sample in result.samples:
            self._append("completions.jsonl", sample)
        self.progress.step(row)
        if result.step == 1 and result.floor is not None and (warning := floor_notice(self.config, result.floor)):
            self.progress.say(warning)
        if warning := signal_notice(self.rows):
            self.progress.say(warning)
        if result.fault:
            self.faults += 1
            self._append("faults.jsonl", {"step": result.step, "fault": result.fault})
            self.progress.say(f"step {result.step} skipped: {result.fault}")
        with writing(self.folder):
            self.loggers.step(row, result.cells, waiting)
        if self.on_row:
            self.on_row({**row, "eval/accuracy": self.evaluations[-1].accuracy})
        return row

    def add_evaluation(self, done: Evaluation) -> None:
        """Write a held-out evaluation and pass it on; the first, of the initial policy, comes before every row."""
        place = self.folder / "environment.json"
        if not place.exists():
            text = json.dumps(self.environment(), indent=2) + "\n"
            with writing(self.folder):
                replace_text(place, text)
        self.evaluations.append(done)
        row = {"step": done.step, "version": done.version, "accuracy": done.accuracy, "n": done.n}
        self._append("eval.jsonl", row)
        self.progress.evaluation(done)
        with writing(self.folder):
            self.loggers.evaluation(done)

    def finish(self, status: str) -> dict[str, Any]:
        """Write summary.json and the timeline; returns the summary."""
        result = summarize(self.config, self.rows, self.evaluations, time.time() - self.started, status, self.cores)
        evaluations = [done for done in self.evaluations if done.span[1] > self.started]
        trace = trace_of(self.config, self.started, self.results, evaluations)
        result |= {
            "staleness_floor": self.floor,
            "faults": self.faults,
            "restarts": self.restarts,
            "notices": notices(self.config, self.floor, result["decisions"], self.rows),
            "thrown_away": discard_report(self.decisions),
            "overlap_fraction": trace["otherData"]["overlap_fraction"],
        }
        with writing(self.folder):
            if self.results:
                text = json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"
                replace_text(self.folder / "timeline.json", text)
                figure_of({self.config.pipeline.mode: trace}).savefig(self.folder / "timeline.png")
            replace_text(self.folder / "summary.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
        return result

    def _row(self, result: StepResult) -> dict[str, Any]:
        """A row of metrics.jsonl: a step's metrics with totals, times and memory."""
        last = self.rows[-1] if self.rows else {"tokens": 0, "samples": 0}
        metrics, times = dict(result.metrics), self._times(result.spans)
        tokens, waited = metrics.pop("tokens"), metrics.pop("time/generator_wait", 0.0)  # in the middle of a batch
        times["time/generate"] -= waited
        times["time/generator_wait"] += waited
        return {
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

    def _times(self, spans: dict[str, Span]) -> dict[str, Any]:
        """Seconds of each stage, waits between them, and the step's own time with evaluations taken out."""
        before = self.results[-1].spans if self.results else None
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
