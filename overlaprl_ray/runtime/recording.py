"""What a run leaves behind, whoever computes it: its folder, its loggers, the screen, and how it ended.

with recording(folder, config, cores=2, progress=Progress(200)) as record:
    record.add_step(result); record.add_evaluation(evaluation)
record.summary["accuracy_final"]
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import check_run, differences
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.files import writing
from overlaprl_ray.runs.loggers import RunLoggers
from overlaprl_ray.runs.notices import floor_notice, signal_notice
from overlaprl_ray.runs.progress import Progress
from overlaprl_ray.runs.recorder import Recorder
from overlaprl_ray.runtime.signals import Stopped, reraise_stopped
from overlaprl_ray.workers.metrics import Evaluation, StepResult

OnRow = Callable[[dict[str, Any]], None]


class Recording:
    """Takes each result of a run as it comes, and in the end holds the summary."""

    def __init__(self, recorder: Recorder, loggers: RunLoggers, progress: Progress, on_row: OnRow | None):
        self.recorder, self.loggers, self.progress, self.on_row = recorder, loggers, progress, on_row
        self.config, self.folder = recorder.config, recorder.folder
        self.summary: dict[str, Any] = {}  # what summary.json holds, and `folder`; filled at the end

    @property
    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by step, as far as it is known."""
        return {done.step: done.accuracy for done in self.recorder.evaluations}

    def add_step(self, result: StepResult, waiting: int = 0) -> None:
        """Write a finished step's row and pass it on; `waiting` rollouts exist that are not trained on yet."""
        row = self.recorder.step(result)
        self.progress.step(row)
        with writing(self.folder):
            self.loggers.step(row, result.cells, waiting)
        if result.step == 1 and result.floor is not None and (warning := floor_notice(self.config, result.floor)):
            self.progress.say(warning)
        if warning := signal_notice(self.recorder.rows):
            self.progress.say(warning)
        if result.fault:
            self.progress.say(f"step {result.step} skipped: {result.fault}")
        if self.on_row:
            self.on_row({**row, "eval/accuracy": self.recorder.evaluations[-1].accuracy})

    def add_evaluation(self, done: Evaluation) -> None:
        """Write a held-out evaluation and pass it on."""
        self.recorder.evaluation(done)
        self.progress.evaluation(done)
        with writing(self.folder):
            self.loggers.evaluation(done)


@contextmanager
def recording(
    folder: Path,
    config: ExperimentConfig,
    cores: int | None,
    progress: Progress,
    on_row: OnRow | None = None,
    resume_from: int | None = None,
) -> Iterator[Recording]:
    """Record a run in a folder. However the block ends, loggers are closed and summary.json says how.

    `resume_from`: the step that the run in this folder is resumed after; None: the folder is new.
    """
    recorder = Recorder(folder, config, cores, resume_from)
    loggers = RunLoggers(config, folder, recorder.rows[-1] if recorder.rows else None)
    record = Recording(recorder, loggers, progress, on_row)
    try:
        with reraise_stopped():
            yield record
        with writing(folder):
            loggers.close()
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong before it
            loggers.close()
        with contextlib.suppress(RunError):
            recorder.summary("interrupted" if isinstance(error, Stopped) else "failed")
        raise
    record.summary = {**recorder.summary("done"), "folder": str(folder)}


def finished_summary(folder: Path, config: ExperimentConfig) -> dict[str, Any] | None:
    """The summary of a run that is done, as `Recording.summary`; None where one can be resumed.

    Raises `ConfigError` where the run in the folder has other settings, or was computed by another algorithm.
    """
    check_run(folder)
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        changed = differences(saved, config)
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(
            f"output.dir = '{folder}': its config.yaml cannot be read ({error}); fix it, or give a new folder"
        ) from None
    if changed:
        raise ConfigError(
            f"output.dir = '{folder}': the run there has other settings ({'; '.join(changed)}); leave them, or start "
            "a new run in a new folder"
        )
    path = folder / "summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text(encoding="utf-8"))
    done = summary["status"] == "done" and summary["steps"] == config.grpo.num_steps
    return {**summary, "folder": str(folder)} if done else None
