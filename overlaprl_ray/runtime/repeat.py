"""A finished or unfinished run repeated serially from its folder, and compared with what it wrote, row by row.

Timing decided one thing, which weights made which batch, and every row says it (column `weights_step`). So a run with
`schedule: latest` can be repeated bit for bit too, on one type of CPU and one build, where its rewards are functions of
their arguments.

    repeat(Path("runs/x"))    # "runs/x: 50 steps repeated, every row equal"
"""

import json
import sys
from pathlib import Path
from typing import Any

from overlaprl_ray.algorithm.schedule import Schedule
from overlaprl_ray.algorithm.stream import ticks_of
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import load_config
from overlaprl_ray.config.identity import check_run
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.environment import environment
from overlaprl_ray.runs.files import as_json, read_rows
from overlaprl_ray.runs.recorder import is_time_field
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.workers.results import StepResult

TOTALS = ("tokens", "samples")  # columns that add up over a run's rows; the replay's are of one step
BITS_DEPEND_ON = ("cpu", "cpu_capability", "versions")  # of environment.json


def repeat(folder: Path) -> str:
    """Repeat a run; returns the line that says that every row is equal.

    Raises `ConfigError` where it cannot be repeated, `RunError` at the first row that differs.
    """
    config = load_config(folder / "config.yaml")
    check_run(folder)
    made_in = _environment(folder)
    _check_device(config, folder, made_in)
    rows = read_rows(folder / "metrics.jsonl")
    schedule = _record(rows, Schedule.of(config), folder)
    here = json.loads(json.dumps(environment()))
    if others := [name for name in BITS_DEPEND_ON if here[name] != made_in.get(name)]:
        print(f"warning: '{folder}' was made elsewhere ({', '.join(others)}), so rows may differ", file=sys.stderr)
    totals = dict.fromkeys(TOTALS, 0)

    def compare(result: StepResult) -> None:
        for name in TOTALS:
            totals[name] += result.metrics[name]
        _compare(rows[result.step - 1], json.loads(as_json({**result.metrics, **totals})), folder)

    replay(config, compare, schedule=schedule, steps=len(rows))
    return f"{folder}: {len(rows)} steps repeated, every row equal"


def _environment(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--replay {folder}: environment.json cannot be read ({error}); give another run") from None


def _check_device(config: ExperimentConfig, folder: Path, made_in: dict[str, Any]) -> None:
    """Only the Hugging Face engine on a CPU gives the same bits again."""
    if config.model.engine == "vllm":
        raise ConfigError(f"--replay {folder}: model.engine = '{config.model.engine}' cannot be repeated, only hf can")
    resources = config.resources
    shares = (resources.generator_gpu, resources.reference_gpu, resources.learner_gpu)
    if made_in.get("gpus") and any(share != 0 for share in shares):
        raise ConfigError(f"--replay {folder}: computed on a GPU ({made_in['gpus'][0]}); only a CPU repeats its bits")


def _record(rows: list[dict[str, Any]], bound: Schedule, folder: Path) -> list[int] | dict[int, int]:
    """What timing decided: the step whose weights made each batch; in a stream the ticks of take-overs."""
    column = "weights_ticks" if bound.stream else "weights_step"
    if not rows or any(column not in row for row in rows):
        raise ConfigError(f"--replay {folder}: its metrics.jsonl has no record (column {column}); give another run")
    if bound.stream:
        return {step: tick for row in rows for step, tick in ticks_of(row[column]).items()}
    schedule = [row[column] for row in rows]
    for batch, made_after in enumerate(schedule, start=1):
        if made_after >= batch or bound.is_too_old(batch, made_after):
            raise ConfigError(
                f"--replay {folder}: metrics.jsonl says that batch {batch} was made after step {made_after}, which is "
                "not possible; give another run"
            )
    return schedule


def _compare(row: dict[str, Any], again: dict[str, Any], folder: Path) -> None:
    """Compare one row, apart from times and memory."""
    names = [name for name in dict.fromkeys([*row, *again]) if not is_time_field(name)]
    for name in names:
        if name not in row or name not in again or row[name] != again[name]:
            raise RunError(
                f"--replay {folder}: step {row['step']}, column {name} is {row.get(name)} in the run and "
                f"{again.get(name)} in its replay; the rows before are equal"
            )
