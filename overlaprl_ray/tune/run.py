"""Running a sweep, or only showing what it would run: Ray Tune gets the trials that are not finished yet.

A fixed sweep (grids, random draws, cases) needs nothing but its trials' folders to be resumed. A search by Optuna or
ASHA also needs what Tune remembers of it, in `tune/search`.

    run_sweep(load_sweep("tune_configs/smoke.yaml"), Path("runs/smoke"), Console())
"""

import contextlib
import dataclasses
import json
import logging
import os
from collections import Counter
from datetime import date, datetime
from pathlib import Path
from typing import Any

import ray
import yaml
from filelock import FileLock, Timeout
from ray import tune
from rich.console import Console

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.monitoring import greeting
from overlaprl_ray.runtime.inputs import check_writable
from overlaprl_ray.runtime.signals import Stopped, reraise_stopped
from overlaprl_ray.runtime.train import ray_running
from overlaprl_ray.tune.best import keep_best
from overlaprl_ray.tune.placement import Nodes, present_nodes, shown, trial_bundles
from overlaprl_ray.tune.plan import DAY, Plan, check_trials, make_trial, plan_trials, sweep_day
from overlaprl_ray.tune.progress import SweepProgress
from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.searchers import POINT, asha, optuna_search
from overlaprl_ray.tune.spec import Sweep
from overlaprl_ray.tune.trainable import (
    failure,
    is_finished,
    leave_error,
    summarize_interrupted,
    trial_of,
    tune_trainable,
)

SEARCH = "search"  # the name under which Tune keeps a search's state


def run_sweep(sweep: Sweep, folder: Path, console: Console) -> None:
    """Run what is left of a sweep in `folder`. Raises `ConfigError` before anything is started, `RunError` at the end
    where a trial failed or is not finished: the other trials' results stand all the same.
    """
    folder = folder.expanduser().absolute()
    plan = _checked_plan(sweep, folder)
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _write_sweep(sweep, plan, folder)
            with ray_running() as context:
                if context is not None and (line := greeting(context)):
                    _say(console, line)
                try:
                    with reraise_stopped():
                        ended = _run(sweep, plan, folder, console)
                except Stopped:  # SIGTERM; SIGINT ends Tune's loop
                    ended = 0
            _check_outcome(sweep, plan, folder, ended)
    except Timeout:
        raise ConfigError(f"--dir = '{folder}': another sweep is running there; wait for it or give another") from None


def dry_run(sweep: Sweep, folder: Path, console: Console) -> None:
    """Show the trials, what is dropped and why, and what each trial reserves; check all that a run would check.

    Starts no trial and writes nothing; raises `ConfigError`.
    """
    on_cluster = "RAY_ADDRESS" in os.environ and not ray.is_initialized()
    with ray_running() if on_cluster else contextlib.nullcontext():
        nodes = present_nodes()
    plan = _checked_plan(sweep, folder)
    for trial in plan.trials:
        state = "finished" if is_finished(trial.folder) else "started" if trial.folder.exists() else "new"
        _say(console, f"{trial.name}  {state:8}  {trial.point}")
    if sweep.optuna:
        for name, domain in sweep.space.shared.items():
            _say(console, f"{name}: {domain}")
    refused = _refused(sweep, plan, nodes, console)
    left = [trial for trial in plan.trials if trial.name not in refused and not is_finished(trial.folder)]
    if sweep.optuna:
        left = [make_trial(sweep, Point({}), folder)] * sweep.tune.samples
    total, dropped = len(plan.trials) or len(left), len(plan.dropped)
    _say(console, f"{total} trials, {total - len(left)} of them finished or refused; {dropped} points dropped")
    kinds = Counter((t.config.pipeline.mode, shown(trial_bundles(t.config, sweep.tune, nodes))) for t in left)
    for (mode, reserved), count in kinds.items():
        _say(console, f"each of {count} in mode {mode} reserves {reserved}")
    _say(console, "on " + "; ".join(f"{cpus:g} CPU, {gpus:g} GPU" for cpus, gpus in nodes))


def _checked_plan(sweep: Sweep, folder: Path) -> Plan:
    plan = plan_trials(sweep, folder)
    if sweep.tune.best_of:
        plan = keep_best(plan, sweep, folder)
    check_writable(f"--dir = '{folder}'", folder)
    changed = check_trials(plan.trials or [make_trial(sweep, Point({}), folder)])
    return dataclasses.replace(plan, changed=changed)


def _refused(sweep: Sweep, plan: Plan, nodes: Nodes, console: Console) -> dict[str, str]:
    """Say which points are dropped and which trials the machine has no room for; the latter, with the reason.

    Raises `ConfigError` where it has room for none.
    """
    refused = {}
    for trial in plan.trials:
        try:
            trial_bundles(trial.config, sweep.tune, nodes)
        except ConfigError as error:
            refused[trial.name] = str(error)
    if refused and len(refused) == len(plan.trials):
        raise ConfigError(f"the machine has no room for any trial: {next(iter(refused.values()))}")
    reasons = [f"refused {name}: {reason}" for name, reason in refused.items()]
    for line in [*plan.notes, *plan.dropped_lines(), *plan.changed, *reasons]:
        _say(console, line)
    return refused


def _write_sweep(sweep: Sweep, plan: Plan, folder: Path) -> None:
    """sweep.yaml, the sweep as resolved, and plan.json, what each trial is. A search must stay what it was."""
    text = yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False)
    file = folder / "sweep.yaml"
    if sweep.searches and file.exists() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(f"--dir = '{folder}': holds a search with other settings, see its sweep.yaml; give another")
    file.write_text(text, encoding="utf-8")
    if sweep_day(folder) is None:
        (folder / DAY).write_text(f"{date.today()}\n")
    rows = [{"trial": trial.name, **dataclasses.asdict(trial.point)} for trial in plan.trials]
    (folder / "plan.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _run(sweep: Sweep, plan: Plan, folder: Path, console: Console) -> int:
    """Give Tune what is left to do; how many trials have finished by now, as Tune counts them."""
    nodes = present_nodes()
    refused = _refused(sweep, plan, nodes, console)
    for trial in plan.trials:
        if trial.name in refused and not is_finished(trial.folder):
            leave_error(trial, refused[trial.name])
    possible = [trial for trial in plan.trials if trial.name not in refused]
    left = possible if sweep.searches else [trial for trial in possible if not is_finished(trial.folder)]
    total, finished = len(possible) or sweep.tune.samples, len(possible) - len(left)
    _say(console, f"sweep {sweep.name}: {total} trials in {folder}, {finished} finished before")
    if not left and not sweep.optuna:
        return 0
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # SweepProgress tells a failure in one line
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths in a configuration mean the driver's folder
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its banner tells of paths that mean nothing here
    trainable = tune_trainable(sweep, folder, nodes)
    state = str(folder / "tune" / SEARCH)
    if sweep.searches and tune.Tuner.can_restore(state):
        return tune.Tuner.restore(state, trainable=trainable, resume_errored=True).fit().num_terminated
    points = [dataclasses.asdict(trial.point) for trial in left]
    run_config = tune.RunConfig(
        name=SEARCH if sweep.searches else f"{datetime.now():%Y%m%d-%H%M%S}",
        storage_path=str(folder / "tune"),
        callbacks=[SweepProgress(sweep, folder, total, finished)],
        failure_config=tune.FailureConfig(sweep.tune.max_failures, fail_fast=sweep.tune.fail_fast),
        stop=dict(sweep.tune.stop) or None,
        verbose=0,
    )
    space = {} if sweep.optuna else {POINT: tune.grid_search(points)}  # Optuna has the space itself
    tuner = tune.Tuner(trainable, param_space=space, tune_config=_tune_config(sweep, folder), run_config=run_config)
    return tuner.fit().num_terminated


def _tune_config(sweep: Sweep, folder: Path) -> tune.TuneConfig:
    def name(trial: Any) -> str:
        """Tune's own folders are named as ours, with Tune's id, which tells two trials of one point apart."""
        return f"{trial_of(trial.config, sweep, folder).name}-{trial.trial_id}"

    return tune.TuneConfig(
        num_samples=sweep.tune.samples if sweep.optuna else 1,
        search_alg=optuna_search(sweep) if sweep.optuna else None,
        scheduler=asha(sweep) if sweep.tune.scheduler == "asha" else None,
        max_concurrent_trials=sweep.tune.max_concurrent,
        reuse_actors=sweep.tune.serial,  # a process takes one trial after another, as `train_serially` allows
        trial_name_creator=name,
        trial_dirname_creator=name,
    )


def _check_outcome(sweep: Sweep, plan: Plan, folder: Path, ended: int) -> None:
    """Raise `RunError` where trials failed or are not finished; `ended` counts where there is no plan."""
    folders = [trial.folder for trial in plan.trials] or sorted((folder / "trials").iterdir())
    for path in folders:
        summarize_interrupted(path)
    total = len(plan.trials) or sweep.tune.samples
    if failed := {path.name: error for path in folders if (error := failure(path))}:
        name, error = next(iter(failed.items()))
        raise RunError(
            f"{len(failed)} of {total} trials failed (the first: {name}: {error}); the same command tries them again"
        )
    if left := total - (ended if sweep.optuna else sum(is_finished(path) for path in folders)):
        lost = (
            " (no folder of theirs is here: do all nodes share --dir?)"
            if ended and not any(path.exists() for path in folders)
            else ""
        )
        raise RunError(f"{left} of {total} trials are not finished{lost}; the same command resumes them")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)
