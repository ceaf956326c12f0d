"""One trial of a sweep: the function that Ray Tune runs, what it reserves for it, and how it ended.

Tune gives it a point; it runs that one pipeline in the trial's own folder, from its newest checkpoint if there is one,
and reports every step. Its actors are named `<trial>/<role>`.

    Tuner(tune_trainable(sweep, folder, nodes), param_space={"point": tune.grid_search([{"settings": {"seed": 0}}])})
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
from overlaprl_ray.runs.files import read_rows, replace_text
from overlaprl_ray.runs.summary import summarize
from overlaprl_ray.tune.placement import Nodes, strategy, trial_bundles
from overlaprl_ray.tune.plan import TrialPlan, make_trial
from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.searchers import POINT
from overlaprl_ray.tune.spec import Sweep
from overlaprl_ray.workers.results import Evaluation

ERROR = "error.txt"  # one line about what ended a trial
STOPPED = "stopped.txt"  # ASHA or tune.stop ended it
CLOSING_S = 300  # a stopped trial may take so long to close its files before its process takes the next one


def tune_trainable(sweep: Sweep, folder: Path, nodes: Nodes) -> Any:
    """`run_trial` with the sweep bound to it and, per trial, its own placement group: one bundle per actor."""

    def resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        bundles = trial_bundles(trial_of(config, sweep, folder).config, sweep.tune, nodes)
        # the trial's own process only waits, unless it does the work
        head: list[dict[str, float]] = [] if sweep.tune.serial else [{}]
        return tune.PlacementGroupFactory([*head, *bundles], strategy=strategy(bundles, nodes))

    bound = tune.with_parameters(run_trial, sweep=sweep, folder=folder, cwd=os.getcwd(), paths=list(sys.path))
    return tune.with_resources(bound, resources)


def trial_of(config: dict[str, Any], sweep: Sweep, folder: Path) -> TrialPlan:
    """The trial that Tune's config stands for."""
    return make_trial(sweep, Point(**config[POINT]), folder)


def run_trial(config: dict[str, Any], sweep: Sweep, folder: Path, cwd: str, paths: Sequence[str]) -> None:
    """Run a trial to its end in `folder`/trials/<hash>; `cwd` and `paths` are the driver's, for relative names.

    Raises what ends it, after leaving one line about it in the trial's error.txt.
    """
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(CLOSING_S)  # Tune fails the next trial where it is exceeded
    sys.path.extend(path for path in paths if path not in sys.path)
    if os.path.isdir(cwd):  # not so on another machine, where only absolute paths mean anything
        os.chdir(cwd)
    trial = trial_of(config, sweep, folder)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # a search may propose a point twice: the second waits, sees that the run is done, and reports its result
    with FileLock(logs / f"{trial.name}.lock"), (logs / f"{trial.name}.log").open("a", encoding="utf-8") as log:
        (trial.folder / ERROR).unlink(missing_ok=True)
        try:
            summary = _run(trial, sweep.tune.serial, Console(file=log, soft_wrap=True))
        except Exception as error:
            leave_error(trial, error)
            raise
    # once more, with the last evaluation, which comes after the last step
    tune.report({**read_rows(trial.folder / "metrics.jsonl")[-1], "eval/accuracy": summary["accuracy_final"]})


def _run(trial: TrialPlan, serial: bool, console: Console) -> dict[str, Any]:
    from overlaprl_ray.runtime.serial import train_serially  # only in the trial's process
    from overlaprl_ray.runtime.train import train

    if serial:
        return train_serially(trial.config, on_row=tune.report)
    return train(trial.config, console, resume=True, on_row=tune.report)


# ---- how a trial ended, as files in its folder ----


def is_finished(folder: Path) -> bool:
    """Whether a trial need not be run again: it is done, or was stopped early for good."""
    return _is_done(folder) or (folder / STOPPED).exists()


def failure(folder: Path) -> str | None:
    """Why a trial failed; None if it did not."""
    path = folder / ERROR
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def leave_error(trial: TrialPlan, error: BaseException | str) -> str:
    """Write and return one line about what ended a trial (with its configuration, if it never began)."""
    is_message = isinstance(error, ConfigError | RunError | str)
    line = " ".join((f"{error}" if is_message else f"{type(error).__name__}: {error}").split())[:2000]
    line = line.partition("; resume with:")[0]  # that is for a single run; here the sweep's own command does it
    trial.folder.mkdir(parents=True, exist_ok=True)
    if not (trial.folder / "config.yaml").exists():
        settings = trial.config.model_dump(mode="json")
        settings["output"]["dir"] = None
        replace_text(trial.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
    replace_text(trial.folder / ERROR, line + "\n")
    return line


def mark_if_stopped(folder: Path, step: Any) -> bool:
    """Remember that Tune ended a trial before its last step; whether it did."""
    if _is_done(folder):
        return False
    replace_text(folder / STOPPED, f"stopped early after step {step}\n")
    return True


def summarize_interrupted(folder: Path) -> None:
    """The summary of a trial whose process was ended from outside, by Tune or by the user."""
    rows = read_rows(folder / "metrics.jsonl")
    if not rows or _is_done(folder) or failure(folder):
        return
    evaluations = [Evaluation(**row, span=(0.0, 0.0)) for row in read_rows(folder / "eval.jsonl")]
    config = load_config(folder / "config.yaml")
    summary = summarize(config, rows, evaluations, rows[-1]["wall_s"], "interrupted", None)
    replace_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _is_done(folder: Path) -> bool:
    path = folder / "summary.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "done"
