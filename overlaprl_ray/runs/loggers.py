"""Where a run's numbers go besides its folder: Ray's metrics, TensorBoard events, and Weights & Biases if asked for.

loggers = RunLoggers(config, folder)
loggers.step(row, cells, queue_depth); loggers.evaluation(done); loggers.close()

tensorboard --logdir runs        # runs and the trials of sweeps, under the same tags
"""

import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.imports import import_without
from overlaprl_ray.runs.ray_metrics import NO_TRIAL, Metrics, tags_of
from overlaprl_ray.workers.results import Cell, Evaluation

TAG_PREFIX = "ray/tune/"  # Ray Tune's own, so that runs and trials share their charts


@dataclass(frozen=True)
class Logger:
    """Where values go: `write` takes those of a step, `close` waits until all is written."""

    write: Callable[[Mapping[str, Any], int], None]
    close: Callable[[], None]


class RunLoggers:
    """All of a run's loggers; `before` is the last row that an earlier process wrote of the same run."""

    def __init__(self, config: ExperimentConfig, folder: Path, before: dict[str, Any] | None = None):
        self.metrics = Metrics(config, before) if ray.is_initialized() else None
        self.loggers = []
        if config.output.tensorboard and tags_of(config)["trial"] == NO_TRIAL:  # Ray Tune writes the trials' events
            self.loggers.append(tensorboard(folder, before))
        if config.output.wandb:
            self.loggers.append(weights_and_biases(config, folder))

    def step(self, row: dict[str, Any], cells: Sequence[Cell] = (), queue_depth: int = 0) -> None:
        """A row of metrics.jsonl, the cells of its decisions, and how many rollouts wait to be trained on."""
        if self.metrics:
            self.metrics.step(row, cells, queue_depth)
        for logger in self.loggers:
            logger.write(row, row["step"])

    def evaluation(self, done: Evaluation) -> None:
        """A held-out evaluation."""
        if self.metrics:
            self.metrics.set("accuracy", done.accuracy)
        for logger in self.loggers:
            logger.write({"eval/accuracy": done.accuracy}, done.step)

    def close(self) -> None:
        """Flush and close; call it however the run ends."""
        if self.metrics:
            self.metrics.close()
        for logger in self.loggers:
            logger.close()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that a chart can show: no text, nothing missing, nothing infinite."""
    return {k: v for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}


def tensorboard(folder: Path, before: dict[str, Any] | None = None) -> Logger:
    """Events in the run's folder, one per step."""
    import_without("tensorboardX", "torch")  # which it takes tensors of, where it is installed
    from tensorboardX import SummaryWriter
    from tensorboardX.proto.summary_pb2 import Summary

    # TensorBoard then forgets the steps that a resumed run repeats
    again = {"purge_step": before["step"] + 1, "filename_suffix": f".{before['step']}"} if before else {}
    writer = SummaryWriter(str(folder), flush_secs=10, **again)

    def write(row: Mapping[str, Any], step: int) -> None:
        # Ray Tune's tags have no colon, as `rewards/module:function` does
        tags = {re.sub(r"[^-/\w.]", "_", TAG_PREFIX + name): value for name, value in numbers(row).items()}
        # one event for all of them: an event per value costs ten times as much
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        writer.file_writer.add_summary(Summary(value=values), step)

    return Logger(write, writer.close)


def weights_and_biases(config: ExperimentConfig, folder: Path) -> Logger:
    """A run at wandb.ai; offline (no account, or WANDB_MODE=offline) in its folder, for `wandb sync`."""
    import wandb

    tags = tags_of(config)
    try:
        run = wandb.init(
            project=config.output.wandb,
            name=folder.name,
            group=None if tags["trial"] == NO_TRIAL else tags["run"],
            dir=str(folder),
            config=config.model_dump(mode="json"),
            mode=wandb_mode(),
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )
    except wandb.errors.Error as error:
        raise RunError(f"output.wandb: {error}; WANDB_MODE=offline needs no connection") from error
    run.define_metric("*", step_metric="step")
    run.define_metric("eval/accuracy", step_metric="eval/step")  # it arrives later than the rows around it

    def write(row: Mapping[str, Any], step: int) -> None:
        text = {name: value for name, value in row.items() if isinstance(value, str)}
        run.log({**numbers(row), **text, "eval/step" if "eval/accuracy" in row else "step": step})

    return Logger(write, run.finish)


def wandb_mode() -> Literal["online", "offline"] | None:
    """None where WANDB_MODE decides; else online with an account, offline without."""
    if "WANDB_MODE" in os.environ:
        return None
    import wandb

    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def check_loggers(config: ExperimentConfig) -> None:
    """Raises `ConfigError` where `output.wandb` is set without the package, or with a log-in that fails."""
    project = config.output.wandb
    if not project:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"output.wandb = '{project}': the package wandb is not installed; "
            "pip install 'overlaprl_ray[wandb]', or set it to null"
        )
    import wandb

    try:
        if wandb_mode() == "online":
            wandb.login(prompt=False)
    except wandb.errors.Error as error:
        raise ConfigError(f"output.wandb = '{project}': {error}; WANDB_MODE=offline needs no account") from None
