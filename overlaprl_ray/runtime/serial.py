"""A run's folder made by the serial replay: the numbers of `train`, without Ray, actors or overlap.

For studies of learning on few cores: two such runs fit two cores, and each needs one process instead of a dozen.

    summary = train_serially(ExperimentConfig(output={"dir": "runs/serial"}))
"""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runs.environment import environment
from overlaprl_ray.runs.files import locked
from overlaprl_ray.runs.progress import Progress
from overlaprl_ray.runs.recorder import OnRow, Recorder
from overlaprl_ray.runtime.fingerprint import check_inputs_kept, dated, keep_inputs, task_inputs
from overlaprl_ray.runtime.inputs import check_inputs
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.recording import finished_summary, recorded
from overlaprl_ray.runtime.replay import replay

INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))  # in the path of what no user edits


def train_serially(config: ExperimentConfig, on_row: OnRow | None = None) -> dict[str, Any]:
    """Run one experiment in this process; returns what summary.json holds, with `folder` added.

    `output.dir` is required. No checkpoints and no final model are written: an unfinished run in the folder starts
    from its first step, a finished one is returned. `on_row` as in `train`. Raises `ConfigError`, `RunError`.

    A process can make one run after another: each seeds the global generators, sets torch's threads and loads the
    users' reward modules anew.
    """
    if config.output.dir is None:
        raise ConfigError("output.dir = null: a serial run needs a folder; give one")
    folder = Path(config.output.dir).expanduser().absolute()
    again = (folder / "config.yaml").exists()
    if again and (summary := finished_summary(folder, config)):
        return summary
    config, task = dated(config, folder), check_inputs(config, again)
    inputs = task_inputs(config, task)
    check_inputs_kept(folder, inputs)
    ready = preflight(config, again, task)
    progress = Progress(config.grpo.num_steps, Console(quiet=True))
    resume_from = 0 if again else None
    set_seed(config.seed)  # for rewards that draw: nothing else here uses the global generators
    try:
        with locked(folder):
            recorder = Recorder(folder, config, ready.plan.cores, environment, progress, on_row, resume_from)
            keep_inputs(folder, inputs | ready.inputs)
            with recorded(recorder) as summary:
                replay(config, recorder.add_step, recorder.add_evaluation, ready.task)
    finally:
        forget(config.task.rewards)
    return summary


def forget(rewards: Sequence[str]) -> None:
    """Forget the users' modules among `rewards`, with their packages and what lies in their folders."""
    for name in {reward.partition(":")[0] for reward in rewards if ":" in reward} & set(sys.modules):
        folder = Path(sys.modules[name].__file__ or "").parent
        for other, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            beside = Path(file).is_relative_to(folder) and not any(text in file for text in INSTALLED)
            own = other.partition(".")[0]
            if own == name.partition(".")[0] or (beside and own not in ("overlaprl_ray", "__main__")):
                del sys.modules[other]
