"""One run from configuration to summary: check, start Ray and the actors, run the pipeline, record; or resume one.

summary = train(ExperimentConfig(seed=1))
summary = train(load_config("runs/x/config.yaml", {"output.dir": "runs/x"}), resume=True)
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import yaml
from rich.console import Console

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.tiny import describe_start
from overlaprl_ray.runs.checkpoint import clear_scratch, newest_checkpoint
from overlaprl_ray.runs.files import locked
from overlaprl_ray.runs.monitoring import greeting, provision
from overlaprl_ray.runs.progress import Progress, closing_table
from overlaprl_ray.runs.recorder import default_folder
from overlaprl_ray.runtime.pipeline import Pipeline
from overlaprl_ray.runtime.preflight import Preflight, available_gpus, check_store, preflight
from overlaprl_ray.runtime.recording import OnRow, finished_summary, recording
from overlaprl_ray.runtime.recovery import Recovery
from overlaprl_ray.runtime.resources import resolve_engine, under_mps
from overlaprl_ray.runtime.signals import Stopped, reraise_stopped, stoppable
from overlaprl_ray.runtime.supervisor import Actors
from overlaprl_ray.tasks import Task


def train(
    config: ExperimentConfig,
    console: Console | None = None,
    *,
    resume: bool = False,
    on_row: OnRow | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """Run one experiment; returns what summary.json holds, with `folder` added.

    `resume` continues the run in `output.dir` after its newest whole checkpoint, or from its first step if there is
    none; one that is done already is returned as it is. `on_row` gets every metrics row as it is written, with the
    newest held-out accuracy as "eval/accuracy". `task` is the configuration's own, where `check_inputs` has built it.
    Raises `ConfigError` before anything is started or written, `RunError` where the run cannot go on, which says how
    to resume it.
    """
    folder = (Path(config.output.dir).expanduser() if config.output.dir else default_folder(config)).absolute()
    resuming = resume and (folder / "config.yaml").exists()
    config, engine = resolve_engine(config, available_gpus())
    if resuming and (summary := finished_summary(folder, config)):
        return summary
    if resuming and config.pipeline.generation == "stream":
        raise ConfigError(f"output.dir = '{folder}': a stream cannot be resumed yet; start it anew in another folder")
    ready = preflight(config, resuming, task)
    config = config.with_setting("output.dir", str(folder))
    progress = Progress(config.grpo.num_steps, console)
    with stoppable(), locked(folder), ray_running(config.output.actor_logs) as context, progress:
        check_store(config, ready.published_bytes)
        start = newest_checkpoint(folder, config, progress.say) if resuming else None
        resume_from = (start.step if start else 0) if resuming else None
        if resuming:
            clear_scratch(folder)
            progress.say(f"resuming after step {resume_from}")
        progress.say(f"run: {folder}")
        if config.grpo.model_name == TINY:
            progress.say(describe_start(config.model.tiny, ready.task.train))
        if context is not None and (line := greeting(context)):
            progress.say(line)
        progress.say(f"starting actors, which load or build the model: {'; '.join([*ready.plan.lines(), engine])}")
        with _resumable(folder), _running(Actors(config, ready.task, ready.plan, folder.name), progress.say) as actors:
            if context is not None:
                provision(Path(context.address_info["session_dir"]))
            with recording(folder, config, ready.plan.cores, progress, on_row, resume_from) as record:
                pipeline = Pipeline(config, actors, record, start)
                mps = ready.plan.cores is None and under_mps()
                recovery = Recovery(pipeline, actors, progress.say, mps)
                for result in recovery.steps():
                    record.add_step(result, pipeline.graph.waiting())
                record.recorder.restarts = recovery.restarts
    closing_table(record.summary, folder, progress.console)
    return record.summary


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """A run that ends early leaves nothing half written, and says how to resume it."""
    try:
        with reraise_stopped():
            yield
    except (Stopped, RunError) as error:
        clear_scratch(folder)
        begun = (folder / "config.yaml").exists()
        remedy = f"resume with: python scripts/train.py --resume {folder}" if begun else "no step was taken"
        raise RunError(f"{'stopped by ' if isinstance(error, Stopped) else ''}{error}; {remedy}") from error


@contextmanager
def _running(actors: Actors, say: Callable[[str], None]) -> Iterator[Actors]:
    try:
        started = time.monotonic()
        actors.start()
        say(f"actors ready after {time.monotonic() - started:.0f} s")
        yield actors
    finally:
        actors.stop()


@contextmanager
def ray_running(actor_logs: bool = False) -> Iterator[Any]:
    """Ray for the time of a block: the one that runs already (or RAY_ADDRESS names), else a local one of our own.

    Gives what `ray.init` returns, or None where Ray was there before.
    """
    if ray.is_initialized():
        yield None
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a dead actor's calls: recovery submits them again
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # no control codes in a log
    context = ray.init(log_to_driver=actor_logs, logging_level=logging.ERROR)
    try:
        with stoppable():  # once more, because Ray sets a handler of its own
            yield context
    finally:
        ray.shutdown()


def dry_run(
    config: ExperimentConfig, console: Console | None = None, resuming: bool = False, task: Task | None = None
) -> Preflight:
    """Check everything and print the resolved configuration and the resource plan; start and write nothing."""
    config, engine = resolve_engine(config, available_gpus())
    ready = preflight(config, resuming, task)
    console = console or Console(soft_wrap=True)
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()
    problems = f"task: {len(ready.task.train)} problems to train on, {len(ready.task.heldout)} held out"
    for text in [settings, f"# {problems}", *(f"# {line}" for line in [*ready.plan.lines(), engine])]:
        console.print(text, highlight=False, markup=False, emoji=False)
    return ready
