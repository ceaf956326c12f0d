"""One trial of a sweep: the function that Ray Tune runs, and what it reserves for it.

Tune gives it a point's settings; it runs that one pipeline in the trial's own folder, from its newest checkpoint where
there is one, and reports every step. Its actors are named `<trial>/<role>`.

    Tuner(tune_trainable(sweep, folder, machine), param_space={"settings": tune.grid_search([{"seed": 0}])})
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from ray import tune
from rich.console import Console

from overlaprl_ray.config.cli import load_config
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.files import replace_text
from overlaprl_ray.runs.summary import summarize
from overlaprl_ray.tune.placement import Machine, strategy, trial_bundles
from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.spec import Sweep, TrialPlan, make_trial
from overlaprl_ray.workers.metrics import Evaluation

SETTINGS = "settings"  # where a point stands in Tune's config
STOPPED = "stopped.txt"  # left in a trial's folder when ASHA or tune.stop ended it


def tune_trainable(sweep: Sweep, folder: Path, machine: Machine) -> Any:
    """`run_trial` with the sweep bound to it and, per trial, its own placement group: one bundle per actor."""

    def resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        trial = make_trial(sweep, Point(config[SETTINGS]), folder)
        bundles = trial_bundles(trial.config, sweep.tune, machine)
        head: list[dict[str, float]] = (
            [] if sweep.tune.serial else [{}]
        )  # the trial's own process only waits, unless it does the work
        return tune.PlacementGroupFactory([*head, *bundles], strategy=strategy(bundles, machine))

    bound = tune.with_parameters(run_trial, sweep=sweep, folder=folder, cwd=os.getcwd(), paths=list(sys.path))
    return tune.with_resources(bound, resources)


def run_trial(config: dict[str, Any], sweep: Sweep, folder: Path, cwd: str, paths: Sequence[str]) -> None:
    """Run a trial to its end in `folder`/trials/<hash>; `cwd` and `paths` are the driver's, for relative names.

    Raises what ends it, after one line about it has been left in the trial's error.txt.
    """
    sys.path.extend(path for path in paths if path not in sys.path)
    if os.path.isdir(cwd):  # not so on another machine, where only absolute paths mean anything
        os.chdir(cwd)
    trial = make_trial(sweep, Point(config[SETTINGS]), folder)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # a search may suggest a point twice: the second waits, finds the run done, and reports its result
    with FileLock(logs / f"{trial.name}.lock"), (logs / f"{trial.name}.log").open("a", encoding="utf-8") as log:
        (trial.folder / "error.txt").unlink(missing_ok=True)
        try:
            summary = _run(trial, sweep.tune.serial, Console(file=log, soft_wrap=True))
        except Exception as error:
            leave_error(trial, error)
            raise
    # once more, with the last evaluation, which comes after the last step
    tune.report({**_last_row(trial.folder), "eval/accuracy": summary["accuracy_final"]})


def _run(trial: TrialPlan, serial: bool, console: Console) -> dict[str, Any]:
    from overlaprl_ray.runtime.serial import train_serially
    from overlaprl_ray.runtime.train import train  # only in the trial's process: the driver needs no torch for it

    if serial:
        return train_serially(trial.config, on_row=tune.report)
    return train(trial.config, console, resume=True, on_row=tune.report)


def _last_row(folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = read_rows(folder / "metrics.jsonl")[-1]
    return row


# ---- how a trial ended, as files in its folder ----


def is_finished(folder: Path) -> bool:
    """Whether a trial need not be run again: it is done, or was stopped early for good."""
    return _summary(folder).get("status") == "done" or (folder / STOPPED).exists()


def leave_error(trial: TrialPlan, error: BaseException | str) -> str:
    """One line about what ended a trial, in its error.txt (with its configuration, if it never began)."""
    known = isinstance(error, ConfigError | RunError | str)
    line = " ".join((f"{error}" if known else f"{type(error).__name__}: {error}").split())[:2000]
    line = line.partition("; resume with:")[0]  # that is for a run alone; here the sweep's own command does it
    trial.folder.mkdir(parents=True, exist_ok=True)
    if not (trial.folder / "config.yaml").exists():
        settings = trial.config.model_dump(mode="json")
        settings["output"]["dir"] = None
        replace_text(trial.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
    replace_text(trial.folder / "error.txt", line + "\n")
    return line


def mark_stopped(trial: TrialPlan, result: dict[str, Any]) -> bool:
    """Remember that Tune ended a trial before its last step; whether it did."""
    if _summary(trial.folder).get("status") == "done":
        return False
    replace_text(trial.folder / STOPPED, f"stopped early after step {result.get('step')}\n")
    return True


def close(folder: Path) -> None:
    """The summary of a trial whose process was ended from outside, by Tune or by the user: `interrupted`."""
    rows = read_rows(folder / "metrics.jsonl")
    if not rows or _summary(folder).get("status") == "done" or (folder / "error.txt").exists():
        return
    evaluations = [
        Evaluation(row["step"], row["version"], row["accuracy"], row["n"], (0.0, 0.0))
        for row in read_rows(folder / "eval.jsonl")
    ]
    config = load_config(folder / "config.yaml")
    summary = summarize(config, rows, evaluations, rows[-1]["wall_s"], "interrupted", None)
    replace_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a jsonl file: the last one may be torn."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
