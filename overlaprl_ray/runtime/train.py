"""One run from configuration to summary: check, start Ray and the actors, run the pipeline, record; or resume one.

summary = train(ExperimentConfig(seed=1))
summary = train(load_config("runs/x/config.yaml", {"output.dir": "runs/x"}), resume=True)
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from rich.console import Console

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.folders import describe_start, find_models
from overlaprl_ray.runs.checkpoint import clear_scratch, newest_checkpoint
from overlaprl_ray.runs.files import locked
from overlaprl_ray.runs.monitoring import greeting, provision
from overlaprl_ray.runs.progress import Progress, closing_table
from overlaprl_ray.runs.recorder import OnRow, Recorder, default_folder
from overlaprl_ray.runtime.fingerprint import check_inputs_kept, dated, keep_inputs, task_inputs
from overlaprl_ray.runtime.inputs import check_inputs
from overlaprl_ray.runtime.pipeline import Pipeline
from overlaprl_ray.runtime.preflight import available_gpus, check_models, check_store, resource_plan
from overlaprl_ray.runtime.recording import finished_summary, recorded
from overlaprl_ray.runtime.recovery import Recovery
from overlaprl_ray.runtime.resources import resolve_engine, under_mps
from overlaprl_ray.runtime.signals import Stopped, reraise_stopped, stoppable
from overlaprl_ray.runtime.supervisor import Actors
from overlaprl_ray.tasks import Task

AT_ONCE_S = 0.2  # checks of the built-in model take less
SOCKET_PATH = 107 if sys.platform == "linux" else 103  # bytes that a Unix socket's path may have
Result = TypeVar("Result")


def train(
    config: ExperimentConfig,
    console: Console | None = None,
    *,
    resume: bool = False,
    on_row: OnRow | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """Run one experiment; returns what summary.json holds, with `folder` added.

    Ray and the actors start while the models are still being checked. `resume` continues the run in `output.dir` after
    its newest whole checkpoint, or from its first step if there is none; one that is done already is returned as it is.
    `on_row` gets every metrics row as it is written, with the newest held-out accuracy as "eval/accuracy". `task` is
    the configuration's own, where `check_inputs` has built it.
    Raises `ConfigError` before anything is started or written, `RunError` where the run cannot go on, which says how
    to resume it.
    """
    folder = (Path(config.output.dir).expanduser() if config.output.dir else default_folder(config)).absolute()
    resuming = resume and (folder / "config.yaml").exists()
    config, engine = resolve_engine(config, available_gpus())
    if resuming and (summary := finished_summary(folder, config)):
        return summary
    task = task or check_inputs(config, resuming)
    plan = resource_plan(config)
    config = dated(config.with_setting("output.dir", str(folder)), folder)
    inputs = task_inputs(config, task)
    check_inputs_kept(folder, inputs)
    checks = _in_background(check_models, config, task, plan)
    progress = Progress(config.grpo.num_steps, console)
    with stoppable(), locked(folder), ray_running(config.output.actor_logs) as context, progress:
        if checks.done():  # else the actors load their models meanwhile; a refusal ends them
            check_store(config, checks.result().published_bytes)
        with _resumable(folder):
            models = find_models(config, task.train)
        actors = Actors(config, task, models, plan, folder.name, progress.say)
        with _resumable(folder), _stopping(actors):
            actors.start()
            ready = checks.result()
            check_store(config, ready.published_bytes)
            start = newest_checkpoint(folder, config, progress.say) if resuming else None
            resume_from = (start.step if start else 0) if resuming else None
            if resuming:
                clear_scratch(folder)
                progress.say(f"resuming after step {resume_from}")
            for notice in (f"run: {folder}", *ready.task.notices):
                progress.say(notice)
            if config.grpo.model_name == TINY:
                progress.say(describe_start(models.policy))
            if context is not None:
                provision(Path(context.address_info["session_dir"]))
                if line := greeting(context):
                    progress.say(line)
            progress.say(f"actors load or build the model: {'; '.join([*plan.lines(), engine])}")
            record = Recorder(folder, config, plan.cores, actors.environment, progress, on_row, resume_from)
            keep_inputs(folder, inputs | ready.inputs)
            with recorded(record) as summary, _stopping(actors):  # first: they would slow down all that is left to do
                pipeline = Pipeline(config, actors, record, start)
                mps = plan.cores is None and under_mps()
                recovery = Recovery(pipeline, actors, progress.say, mps)
                for result in recovery.steps():
                    record.add_step(result, pipeline.graph.waiting())
                record.restarts = recovery.restarts
    closing_table(summary, folder, progress.console)
    return summary


def _in_background(check: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """A check in a thread of its own, for what imports take as long as Ray's start; waits for one that needs none."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(check, *arguments)
    pool.shutdown(wait=False)
    if wait([future], timeout=AT_ONCE_S).done:
        future.result()
    return future


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
def _stopping(actors: Actors) -> Iterator[None]:
    try:
        yield
    finally:
        actors.stop()


def check_socket_path() -> None:
    """Refuse a folder for temporary files whose path is too long for the sockets that a local Ray makes in it."""
    from ray._common.utils import get_default_ray_temp_dir

    session = Path(get_default_ray_temp_dir()) / f"session_2026-12-31_23-59-59_123456_{os.getpid()}"
    excess = len(os.fsencode(session / "sockets" / "plasma_store")) - SOCKET_PATH
    if excess > 0 and os.environ.get("RAY_ADDRESS", "local") == "local":
        variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
        raise ConfigError(
            f"{variable} = '{os.environ.get(variable)}': its path is {excess} bytes too long for the sockets that Ray "
            f"makes there; set {variable} to a shorter one, such as /tmp"
        )


@contextmanager
def ray_running(actor_logs: bool = False) -> Iterator[Any]:
    """Ray for the time of a block: the one that runs already (or RAY_ADDRESS names), else a local one of our own.

    Gives what `ray.init` returns, or None where Ray was there before.
    """
    if ray.is_initialized():
        yield None
        return
    check_socket_path()
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
