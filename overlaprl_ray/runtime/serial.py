"""A run's folder made by the serial replay: the numbers of `train`, without Ray, actors or overlap.

For studies of learning on few cores: two such runs fit two cores, and each needs one process instead of a dozen.

    summary = train_serially(ExperimentConfig(output={"dir": "runs/serial"}))
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runs.environment import environment
from overlaprl_ray.runs.files import locked
from overlaprl_ray.runs.progress import Progress
from overlaprl_ray.runs.recorder import OnRow, Recorder
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.recording import finished_summary, recorded
from overlaprl_ray.runtime.replay import replay


def train_serially(config: ExperimentConfig, on_row: OnRow | None = None) -> dict[str, Any]:
    """Run one experiment in this process; returns what summary.json holds, with `folder` added.

    `output.dir` is required. No checkpoints and no final model are written: an unfinished run in the folder starts
    from its first step, a finished one is returned. `on_row` as in `train`. Raises `ConfigError`, `RunError`.
    """
    if config.output.dir is None:
        raise ConfigError("output.dir = null: a serial run needs a folder; give one")
    folder = Path(config.output.dir).expanduser().absolute()
    again = (folder / "config.yaml").exists()
    if again and (summary := finished_summary(folder, config)):
        return summary
    ready = preflight(config, resuming=again)
    progress = Progress(config.grpo.num_steps, Console(quiet=True))
    resume_from = 0 if again else None
    with locked(folder):
        recorder = Recorder(folder, config, ready.plan.cores, environment, progress, on_row, resume_from)
        with recorded(recorder) as summary:
            replay(config, recorder.add_step, recorder.add_evaluation, ready.task)
    return summary
