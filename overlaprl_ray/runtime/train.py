"""One run from configuration to summary: check, start Ray and the actors, run the pipeline, save; or go on with one.

summary = train(ExperimentConfig(seed=1))
summary = train(load_config("runs/x/config.yaml", {"output.dir": "runs/x"}), resume=True)
"""

import contextlib
import json
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

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import differences
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.checkpoint import Checkpoint, clear_scratch, newest_checkpoint
from overlaprl_ray.runs.files import locked, writing
from overlaprl_ray.runs.loggers import RunLoggers
from overlaprl_ray.runs.monitoring import greeting, provision
from overlaprl_ray.runs.notices import floor_notice
from overlaprl_ray.runs.progress import Progress, closing_table
from overlaprl_ray.runs.recorder import Recorder, default_folder
from overlaprl_ray.runtime.pipeline import Pipeline
from overlaprl_ray.runtime.preflight import Preflight, check_store, preflight
from overlaprl_ray.runtime.recovery import run_through
from overlaprl_ray.runtime.signals import Stopped, stoppable, told_plainly
from overlaprl_ray.runtime.supervisor import Actors
from overlaprl_ray.workers.metrics import Evaluation, StepResult

OnRow = Callable[[dict[str, Any]], None]


def train(
    config: ExperimentConfig, console: Console | None = None, *, resume: bool = False, on_row: OnRow | None = None
) -> dict[str, Any]:
    """Run one experiment; returns what summary.json holds, with `folder` added.

    `resume` goes on with the run in `output.dir` from its newest whole checkpoint, or from its first step if there
    is none; one that is done already is returned as it is. `on_row` gets every metrics row as it is written, with the
    newest held-out accuracy as "eval/accuracy". Raises `ConfigError` before anything is started or written, `RunError`
    where the run cannot go on, which says how to resume it.
    """
    folder = Path(config.output.dir).expanduser() if config.output.dir else default_folder(config)
    folder = folder.absolute()
    resuming = resume and (folder / "config.yaml").exists()
    if resuming and (done := finished_summary(folder, config)):
        return {**done, "folder": str(folder)}
    ready = preflight(config, resuming)
    config = config.model_copy(update={"output": config.output.model_copy(update={"dir": str(folder)})})
    console = console or Console(soft_wrap=True)
    progress = Progress(config.grpo.num_steps, console)
    with stoppable(), locked(folder), ray_running(config.output.actor_logs) as context, progress:
        check_store(config, ready.published_bytes)
        start = newest_checkpoint(folder, config, progress.say) if resuming else None
        if resuming:
            clear_scratch(folder)
            progress.say(f"going on after step {start.step if start else 0}")
        progress.say(f"run: {folder}")
        if context is not None and (line := greeting(context)):
            progress.say(line)
        progress.say(f"starting actors, which load or build the model: {'; '.join(ready.plan.lines())}")
        try:
            with told_plainly(), _actors(config, ready, folder.name, progress) as actors:
                if context is not None:
                    provision(Path(context.address_info["session_dir"]))
                resume_from = (start.step if start else 0) if resuming else None
                recorder = Recorder(folder, config, ready.plan.cores, resume_from)
                summary = _run(config, actors, recorder, start, progress, on_row)
        except Stopped as signal:
            clear_scratch(folder)
            raise RunError(f"stopped by {signal}{_how_to_resume(folder)}") from None
        except RunError as error:
            clear_scratch(folder)
            raise RunError(f"{error}{_how_to_resume(folder)}") from error
    closing_table(summary, folder, console)
    return {**summary, "folder": str(folder)}


def _how_to_resume(folder: Path) -> str:
    if not (folder / "config.yaml").exists():
        return "; no step was taken"
    return f"; go on with: python scripts/train.py --resume {folder}"


def finished_summary(folder: Path, config: ExperimentConfig) -> dict[str, Any] | None:
    """The summary of a run that is done; None where one can be resumed. `ConfigError` for another's folder."""
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        changed = differences(saved, config)
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"output.dir = '{folder}': its config.yaml cannot be read ({error}); mend it") from None
    if changed:
        raise ConfigError(
            f"output.dir = '{folder}': the run there has other settings ({'; '.join(changed)}); leave them, or start "
            "a new run in a new folder"
        )
    path = folder / "summary.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if found["status"] == "done" and found["steps"] == config.grpo.num_steps else None


@contextmanager
def _actors(config: ExperimentConfig, ready: Preflight, run: str, progress: Progress) -> Iterator[Actors]:
    actors = Actors(config, ready.task, ready.plan, run)
    try:
        started = time.monotonic()
        actors.start()
        progress.say(f"actors ready after {time.monotonic() - started:.0f} s")
        yield actors
    finally:
        actors.stop()


def _run(
    config: ExperimentConfig,
    actors: Actors,
    recorder: Recorder,
    start: Checkpoint | None,
    progress: Progress,
    on_row: OnRow | None,
) -> dict[str, Any]:
    loggers = RunLoggers(config, recorder.folder, recorder.rows[-1] if recorder.rows else None)

    def on_step(result: StepResult) -> None:
        row = recorder.step(result)
        progress.step(row)
        with writing(recorder.folder):
            loggers.step(row, result.cells, pipeline.waiting())
        if result.step == 1 and result.floor is not None and (warning := floor_notice(config, result.floor)):
            progress.say(warning)
        if result.fault:
            progress.say(f"step {result.step} skipped: {result.fault}")
        if on_row:
            on_row({**row, "eval/accuracy": recorder.evaluations[-1].accuracy})

    def on_evaluation(done: Evaluation) -> None:
        recorder.evaluation(done)
        progress.evaluation(done)
        with writing(recorder.folder):
            loggers.evaluation(done)

    pipeline = Pipeline(config, actors, recorder.folder, on_step, on_evaluation, start)
    pipeline.accuracies = {e.step: e.accuracy for e in recorder.evaluations}
    status = "failed"
    try:
        save_to = recorder.folder / "final" if config.output.save_final else None
        with told_plainly():
            recorder.restarts = run_through(pipeline, save_to, progress.say)
        with writing(recorder.folder):
            loggers.close()
        status = "done"
    except Stopped:
        status = "interrupted"
        raise
    finally:
        if status != "done":  # then a full disk must not hide what went wrong before it
            with contextlib.suppress(OSError):
                loggers.close()
            with contextlib.suppress(RunError):
                recorder.summary(status)
    return recorder.summary(status)


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
        with stoppable():  # once more, for Ray sets a handler of its own
            yield context
    finally:
        ray.shutdown()


def dry_run(config: ExperimentConfig, console: Console | None = None, resuming: bool = False) -> Preflight:
    """Check everything and print the resolved configuration and the resource plan; start and write nothing."""
    ready = preflight(config, resuming)
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
