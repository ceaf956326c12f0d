"""How a run's record ends, however the run does; and the summary of one that is done.

with recorded(recorder) as summary:
    recorder.add_step(result)
summary["accuracy_final"]
"""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import check_run, differences
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.files import writing
from overlaprl_ray.runs.recorder import Recorder
from overlaprl_ray.runtime.signals import Stopped, reraise_stopped


@contextmanager
def recorded(recorder: Recorder) -> Iterator[dict[str, Any]]:
    """However the block ends, loggers are closed and summary.json says how; gives what then holds it, and `folder`."""
    summary: dict[str, Any] = {}
    try:
        with reraise_stopped():
            yield summary
        with writing(recorder.folder):
            recorder.loggers.close()
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong before it
            recorder.loggers.close()
        with contextlib.suppress(RunError):
            recorder.finish("interrupted" if isinstance(error, Stopped) else "failed")
        raise
    summary |= {**recorder.finish("done"), "folder": str(recorder.folder)}


def finished_summary(folder: Path, config: ExperimentConfig) -> dict[str, Any] | None:
    """The summary of a run that is done, as `recorded` gives it; None where one can be resumed.

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
