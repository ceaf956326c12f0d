"""Where a run's numbers go besides its folder: Ray's metrics, TensorBoard events, and Weights & Biases if asked for.

loggers = RunLoggers(config, folder)
loggers.step(row, cells, queue_depth); loggers.evaluation(done); loggers.close()

tensorboard --logdir runs        # runs, and the trials of sweeps, under the same tags
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import ray

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.telemetry import NO_TRIAL, RunMetrics, tags_of
from overlaprl_ray.workers.cells import Cell
from overlaprl_ray.workers.metrics import Evaluation

TAG_PREFIX = "ray/tune/"  # as Ray Tune's own logger has it, so that runs and trials lie in the same charts


class Logger(Protocol):
    """What a run's numbers are handed to."""

    def step(self, row: dict[str, Any], cells: Sequence[Cell], queue_depth: int) -> None:
        """A row of metrics.jsonl."""

    def evaluation(self, step: int, accuracy: float) -> None:
        """A held-out evaluation of the policy after a step."""

    def close(self) -> None:
        """The run is over."""


class RunLoggers:
    """All of a run's loggers as one; `before` is the last row that an earlier process wrote of the same run."""

    def __init__(self, config: ExperimentConfig, folder: Path, before: dict[str, Any] | None = None):
        self.loggers: list[Logger] = []
        if ray.is_initialized():
            self.loggers.append(RunMetrics(config, before))
        if config.output.tensorboard and tags_of(config)["trial"] == NO_TRIAL:  # of trials, Ray Tune writes events
            self.loggers.append(TensorBoard(folder, before))
        if config.output.wandb:
            self.loggers.append(WeightsAndBiases(config, folder))

    def step(self, row: dict[str, Any], cells: Sequence[Cell] = (), queue_depth: int = 0) -> None:
        """A row of metrics.jsonl, with the cells of its decisions and how many rollouts wait to be trained on."""
        for logger in self.loggers:
            logger.step(row, cells, queue_depth)

    def evaluation(self, done: Evaluation) -> None:
        """A held-out evaluation."""
        for logger in self.loggers:
            logger.evaluation(done.step, done.accuracy)

    def close(self) -> None:
        """Flush and close files; to be called however the run ends."""
        for logger in self.loggers:
            logger.close()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that a chart can show: no text, nothing missing, nothing infinite."""
    return {k: v for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}


def tag_of(name: str) -> str:
    """A metric's tag in TensorBoard: as Ray Tune's, which takes no colons, as `rewards/module:function` has one."""
    return TAG_PREFIX + re.sub(r"[^-/\w.]", "_", name)


class TensorBoard:
    """Events in the run's folder, one per step, as TensorBoard reads them."""

    def __init__(self, folder: Path, before: dict[str, Any] | None = None):
        from tensorboardX import SummaryWriter

        # of a resumed run TensorBoard forgets the steps that are now done again
        again = {"purge_step": before["step"] + 1, "filename_suffix": f".{before['step']}"} if before else {}
        self.writer = SummaryWriter(str(folder), flush_secs=10, **again)

    def step(self, row: dict[str, Any], cells: Sequence[Cell], queue_depth: int) -> None:
        """Every number of the row under its own tag, at its step."""
        self._write(numbers(row), row["step"])

    def evaluation(self, step: int, accuracy: float) -> None:
        """At the step whose policy it is about."""
        self._write({"eval/accuracy": accuracy}, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self.writer.close()

    def _write(self, values: dict[str, float], step: int) -> None:
        # one event for all of them: a step with an event per value costs ten times as much
        from tensorboardX.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=points), step)


class WeightsAndBiases:
    """A run at wandb.ai; without an account, or with WANDB_MODE=offline, in its folder, for `wandb sync` later."""

    def __init__(self, config: ExperimentConfig, folder: Path):
        import wandb

        tags = tags_of(config)
        trial = tags["trial"] != NO_TRIAL
        try:
            self.run = wandb.init(
                project=config.output.wandb,
                name=folder.name,
                group=tags["run"] if trial else None,
                dir=str(folder),
                config=config.model_dump(mode="json"),
                mode=wandb_mode(),
                settings=wandb.Settings(silent=True, console="off"),
                reinit="create_new",
            )
        except wandb.errors.Error as error:
            raise RunError(f"output.wandb: {error}; WANDB_MODE=offline needs no connection") from error
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("eval/accuracy", step_metric="eval/step")  # it arrives later than the rows around it

    def step(self, row: dict[str, Any], cells: Sequence[Cell], queue_depth: int) -> None:
        """The row's numbers, and its decision."""
        self.run.log({**numbers(row), "staleness/decision": row["staleness/decision"]})

    def evaluation(self, step: int, accuracy: float) -> None:
        """Against a step axis of its own."""
        self.run.log({"eval/accuracy": accuracy, "eval/step": step})

    def close(self) -> None:
        """Wait until everything is sent, or written."""
        self.run.finish()


def wandb_mode() -> Literal["online", "offline"] | None:
    """None, which means WANDB_MODE, where that is set; else online with an account and offline without one."""
    if "WANDB_MODE" in os.environ:
        return None
    import wandb

    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def check_loggers(config: ExperimentConfig) -> None:
    """Raises `ConfigError` where `output.wandb` asks for what is not there: the package, or the log-in."""
    project = config.output.wandb
    if not project:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"output.wandb = '{project}': the package wandb is not installed; "
            "pip install 'overlaprl_ray[wandb]', or leave it null"
        )
    import wandb

    try:
        if wandb_mode() == "online":
            wandb.login(prompt=False)
    except wandb.errors.Error as error:
        raise ConfigError(f"output.wandb = '{project}': {error}; WANDB_MODE=offline needs no account") from None
