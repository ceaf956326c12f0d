"""One run from configuration to summary: check, start Ray and the actors, run the pipeline, save.

summary = train(ExperimentConfig(seed=1))
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import yaml
from rich.console import Console

from overlaprl_ray.actors import Actors, fetch, start_actors
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.metrics import StepResult
from overlaprl_ray.pipeline import Pipeline
from overlaprl_ray.preflight import Preflight, preflight
from overlaprl_ray.progress import Progress, closing_table
from overlaprl_ray.recorder import Recorder, default_folder


def train(config: ExperimentConfig, console: Console | None = None) -> dict[str, Any]:
    """Run one experiment; returns what summary.json holds, with `folder` added.

    Raises `ConfigError` before anything is started or written, `RunError` where the run cannot go on.
    """
    ready = preflight(config)
    folder = Path(config.output.dir).expanduser() if config.output.dir else default_folder(config)
    folder = folder.absolute()
    console = console or Console(soft_wrap=True)
    with ray_running(), Progress(config.grpo.num_steps, console) as progress:
        progress.say(f"run: {folder}")
        progress.say(f"starting actors, which load or build the model: {'; '.join(ready.plan.lines())}")
        started = time.monotonic()
        actors = start_actors(config, ready.task, ready.plan, run=folder.name)
        progress.say(f"actors ready after {time.monotonic() - started:.0f} s")
        try:
            summary = _run(config, actors, Recorder(folder, config, ready.plan.cores), progress)
        finally:
            actors.stop()
    closing_table(summary, folder, console)
    return {**summary, "folder": str(folder)}


def _run(config: ExperimentConfig, actors: Actors, recorder: Recorder, progress: Progress) -> dict[str, Any]:
    def on_step(result: StepResult) -> None:
        progress.step(recorder.step(result))

    def on_evaluation(done: Any) -> None:
        recorder.evaluation(done)
        progress.evaluation(done)

    try:
        Pipeline(config, actors, on_step, on_evaluation).run()
        if config.output.save_final:
            saving = actors.learner.save.remote(str(recorder.folder / "final"))
            fetch(saving, "the final model to be saved", config.pipeline.timeout_s, "pipeline.timeout_s")
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong before it
            recorder.summary(status="failed")
        raise
    return recorder.summary(status="done")


@contextmanager
def ray_running() -> Iterator[None]:
    """Ray for the time of a block: the one that runs already (or RAY_ADDRESS names), else a local one of our own."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def dry_run(config: ExperimentConfig, console: Console | None = None) -> Preflight:
    """Check everything and print the resolved configuration and the resource plan; start and write nothing."""
    ready = preflight(config)
    console = console or Console(soft_wrap=True)
    console.print(
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip(),
        highlight=False,
        markup=False,
        emoji=False,
    )
    task, plan = ready.task, ready.plan
    for line in [f"task: {len(task.train)} problems to train on, {len(task.heldout)} held out", *plan.lines()]:
        console.print(f"# {line}", highlight=False, markup=False, emoji=False)
    return ready
