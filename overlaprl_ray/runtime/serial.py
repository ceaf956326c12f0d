"""A run's folder made by the serial replay: the numbers of `train`, without Ray, actors or overlap.

For studies of learning on few cores: two such runs fit two cores, and each needs one process instead of a dozen.

    summary = train_serially(ExperimentConfig(output={"dir": "runs/serial"}))
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.files import locked, writing
from overlaprl_ray.runs.loggers import RunLoggers
from overlaprl_ray.runs.recorder import Recorder
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.train import finished_summary
from overlaprl_ray.workers.metrics import Evaluation, StepResult


def train_serially(config: ExperimentConfig, on_row: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Run one experiment in this process; returns what summary.json holds, with `folder` added.

    `output.dir` is required. No checkpoints and no final model are written: an unfinished run in the folder starts
    anew, a finished one is returned. `on_row` as in `train`. Raises `ConfigError`, `RunError`.
    """
    if config.output.dir is None:
        raise ConfigError("output.dir = null: a serial run needs a folder; give one")
    folder = Path(config.output.dir).expanduser().absolute()
    again = (folder / "config.yaml").exists()
    if again and (done := finished_summary(folder, config)):
        return {**done, "folder": str(folder)}
    plan = preflight(config, resuming=again).plan
    with locked(folder):
        recorder = Recorder(folder, config, plan.cores, resume_from=0 if again else None)
        status = "failed"

        loggers = RunLoggers(config, folder)

        def on_step(result: StepResult) -> None:
            row = recorder.step(result)
            loggers.step(row, result.cells)
            if on_row:
                on_row({**row, "eval/accuracy": recorder.evaluations[-1].accuracy})

        def on_evaluation(done: Evaluation) -> None:
            recorder.evaluation(done)
            loggers.evaluation(done)

        try:
            replay(config, on_step, on_evaluation)
            with writing(folder):
                loggers.close()
            status = "done"
        finally:
            if status != "done":  # then a full disk must not hide what went wrong before it
                with contextlib.suppress(OSError):
                    loggers.close()
                with contextlib.suppress(RunError):
                    recorder.summary(status)
        summary = recorder.summary(status)
    return {**summary, "folder": str(folder)}
