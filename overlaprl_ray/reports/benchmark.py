"""How fast each mode is on the same work, and how near to what perfect overlap would give.

Runs are interleaved (every mode once, then every mode again), so that a machine that grows busy slows all of them
alike; repeat r of every mode has the same seed. Medians are reported, with the range over repeats.

    run_benchmark(config, BenchmarkPlan(modes=["sync", "overlap"]), Path("runs/benchmark"), Console())
"""

import json
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import yaml
from rich.console import Console

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.grpo import TINY
from overlaprl_ray.models.tiny import tiny_folder
from overlaprl_ray.reports.benchmark_report import write_report
from overlaprl_ray.runs.recorder import environment
from overlaprl_ray.runs.summary import STAGES, WARM_UP, bounds
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.supervisor import fetch
from overlaprl_ray.runtime.train import ray_running, train
from overlaprl_ray.tasks import Task


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is run: `threads_sync` are thread counts per actor that `sync` is measured at besides the configured one."""

    modes: Sequence[str]
    repeats: int = 3
    threads_sync: Sequence[int] = ()
    target_accuracy: float | None = None


def variants(config: ExperimentConfig, plan: BenchmarkPlan) -> dict[str, ExperimentConfig]:
    """Each row's label and configuration, the configured seed still in it. Final models are not saved."""
    usual = config.resources.threads
    wanted = []
    for mode in plan.modes:
        wanted.append((mode, mode, usual))
        if mode == "sync":
            extra = sorted(set(plan.threads_sync) - {usual})
            wanted += [(f"sync ({n} thread{'s' if n > 1 else ''})", mode, n) for n in extra]
    return {
        label: config.model_copy(
            update={
                "pipeline": config.pipeline.model_copy(update={"mode": mode}),
                "resources": config.resources.model_copy(update={"threads": threads}),
                "output": config.output.model_copy(update={"save_final": False}),
            }
        )
        for label, mode, threads in wanted
    }


def run_benchmark(config: ExperimentConfig, plan: BenchmarkPlan, folder: Path, console: Console) -> dict[str, Any]:
    """Run every variant `plan.repeats` times in one Ray; returns (and writes) what benchmark.json holds.

    The files are written anew after every run, so that a benchmark cut short keeps what it has measured.
    """
    ready = preflight(config)
    # on a GPU the stages share something that has no cores to count
    cores = None if ready.plan.learner_gpu or ready.plan.generator_gpu else os.cpu_count()
    rows: list[dict[str, Any]] = []
    with ray_running():
        chosen = variants(_with_one_model(config, ready.task), plan)
        total, started = plan.repeats * len(chosen), time.monotonic()
        for repeat in range(plan.repeats):
            for label, variant in chosen.items():
                slug = re.sub(r"\W+", "-", label).strip("-")
                where = folder / f"r{repeat + 1}-{slug}"
                console.print(f"run {len(rows) + 1}/{total}: {label}, repeat {repeat + 1}", highlight=False)
                output = variant.output.model_copy(update={"dir": str(where)})
                train(variant.model_copy(update={"seed": config.seed + repeat, "output": output}), Console(quiet=True))
                rows.append(read_run(where, label, repeat + 1, plan.target_accuracy))
                left = (time.monotonic() - started) / len(rows) * (total - len(rows))
                done = rows[-1]
                text = f"  {done['step_s']:.3f} s per step, {done['steps_per_s']:.2f} steps/s; about {left:.0f} s left"
                console.print(text, highlight=False)
                found = {
                    "config": config.model_dump(mode="json"),
                    "repeats": plan.repeats,
                    "target_accuracy": plan.target_accuracy,
                    "cores": cores,
                    "environment": environment(),
                    "modes": compare(rows, cores),
                    "runs": rows,
                }
                write_report(folder, found)
    return found


def _with_one_model(config: ExperimentConfig, task: Task) -> ExperimentConfig:
    """The built-in model by the folder it was built in: its bits depend on threads, and all must start alike."""
    if config.grpo.model_name != TINY:
        return config

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.resources.threads)}})
    def build() -> str:
        torch.set_num_threads(config.resources.threads)
        return str(tiny_folder(config.model.tiny, task.train))

    limit = config.resources.start_timeout_s
    folder = fetch(build.remote(), "the built-in model to be made", limit, "resources.start_timeout_s")
    return config.model_copy(update={"grpo": config.grpo.model_copy(update={"model_name": folder})})


# ---- from files to numbers ----


def read_run(folder: Path, label: str, repeat: int, target_accuracy: float | None) -> dict[str, Any]:
    """One run's folder as one flat row. Times are medians over the steps after warm-up; rates are work over time."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = _read_jsonl(folder / "metrics.jsonl")
    evaluations = _read_jsonl(folder / "eval.jsonl")
    steady = rows[WARM_UP:] or rows
    before = rows[WARM_UP - 1] if len(rows) > WARM_UP else {"tokens": 0, "samples": 0}
    seconds = sum(row["time/step"] for row in steady)
    memory = sorted(name for name in rows[-1] if name.startswith("memory/"))
    return {
        "label": label,
        "mode": config["pipeline"]["mode"],
        "repeat": repeat,
        "threads": config["resources"]["threads"],
        "seed": config["seed"],
        "lag": summary["lag"],
        "steps": len(rows),
        "step_s": _median(row["time/step"] for row in steady),
        "steps_per_s": len(steady) / seconds,
        "tokens_per_s": (rows[-1]["tokens"] - before["tokens"]) / seconds,
        "samples_per_s": (rows[-1]["samples"] - before["samples"]) / seconds,
        **{f"{stage}_s": _median(row[f"time/{stage}"] for row in steady) for stage in STAGES},
        "learner_wait_s": _median(row["time/learner_wait"] for row in steady),
        "generator_wait_s": _median(row["time/generator_wait"] for row in steady),
        "overlap_fraction": summary["overlap_fraction"],
        "reward_first_10": summary["reward_first_10"],
        "reward_last_10": summary["reward_last_10"],
        "accuracy_start": summary["accuracy_start"],
        "accuracy_final": summary["accuracy_final"],
        "seconds_to_target": seconds_to(target_accuracy, evaluations, rows),
        **summary["decisions"],
        **{name: max(row[name] for row in rows if row[name] is not None) for name in memory},
        "wall_s": summary["wall_s"],
        "folder": folder.name,
    }


def seconds_to(
    target: float | None, evaluations: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> float | None:
    """Wall clock until the weights existed that first reached a held-out accuracy; None if none did, or none was set.

    It can be no finer than `output.eval_every`; evaluations that ran earlier are part of it, in every mode alike.
    """
    reached = {0: 0.0, **{row["step"]: row["wall_s"] for row in rows}}
    hits = [e["step"] for e in evaluations if target is not None and e["accuracy"] >= target]
    return reached[min(hits)] if hits else None


def compare(rows: Sequence[dict[str, Any]], cores: int | None) -> list[dict[str, Any]]:
    """One entry per label: medians over its runs, speed-up over `sync`, and overlap efficiency.

    Stage times come from the `sync` runs at the same threads: stages that overlap slow one another down, and bounds
    made of those would flatter the figure. Without such runs there is no speed-up or no efficiency (None).
    """
    baseline = {row["repeat"]: row["step_s"] for row in rows if row["label"] == "sync"}
    fastest = min(_step_times(rows, "sync").values(), default=None)
    out = []
    for label in dict.fromkeys(row["label"] for row in rows):
        runs = [row for row in rows if row["label"] == label]
        first, step = runs[0], median(run["step_s"] for run in runs)
        stages = _stages(rows, first["threads"])
        limits = bounds(stages, first["mode"], first["lag"], cores) if stages else {"serial": None, "bound": None}
        ratios = [baseline[run["repeat"]] / run["step_s"] for run in runs if run["repeat"] in baseline]
        out.append(
            {
                "label": label,
                "mode": first["mode"],
                "threads": first["threads"],
                "lag": first["lag"],
                "runs": len(runs),
                "step_s": step,
                "step_s_min": min(run["step_s"] for run in runs),
                "step_s_max": max(run["step_s"] for run in runs),
                **{name: _median(run[name] for run in runs) for name in _MEDIANS},
                "speed_up": median(baseline.values()) / step if baseline else None,
                "speed_up_over_fastest_sync": fastest / step if fastest else None,
                "speed_up_min": min(ratios, default=None),
                "speed_up_max": max(ratios, default=None),
                "serial_s": limits["serial"],
                "bound_s": limits["bound"],
                "efficiency": limits["bound"] / step if limits["bound"] else None,
                "step_over_serial": step / limits["serial"] if limits["serial"] else None,
            }
        )
    return out


_MEDIANS = ("steps_per_s", "tokens_per_s", "samples_per_s", *(f"{stage}_s" for stage in STAGES), "learner_wait_s",
            "generator_wait_s", "overlap_fraction", "reward_first_10", "reward_last_10", "accuracy_start",
            "accuracy_final", "seconds_to_target")  # fmt: skip


def _step_times(rows: Sequence[dict[str, Any]], mode: str) -> dict[str, float]:
    labels = {row["label"] for row in rows if row["mode"] == mode}
    return {label: median(row["step_s"] for row in rows if row["label"] == label) for label in labels}


def _stages(rows: Sequence[dict[str, Any]], threads: int) -> dict[str, float] | None:
    runs = [row for row in rows if row["mode"] == "sync" and row["threads"] == threads]
    return {stage: median(run[f"{stage}_s"] or 0.0 for run in runs) for stage in STAGES} if runs else None


def _median(values: Iterable[float | None]) -> float | None:
    """Of what there is; a run that never reached something counts as infinitely late only if most did not."""
    found = [math.inf if value is None else value for value in values]
    middle = median(found) if found else math.inf
    return middle if math.isfinite(middle) else None


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
