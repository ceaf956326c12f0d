"""Running a sweep: what is still to do, by Ray Tune; then one table of everything in the sweep's folder.

A fixed sweep (grids, random draws, cases) needs nothing to go on but its trials' folders. A search by Optuna or ASHA
also needs what Tune remembers of it, in `tune/search`.

    run_sweep(load_sweep("tune_configs/smoke.yaml"), Path("runs/smoke"), Console())
"""

import json
import logging
import os
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from ray import tune
from rich.console import Console

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.reports.results import load, markdown, save, terminal_table
from overlaprl_ray.runs.monitoring import greeting
from overlaprl_ray.runtime.inputs import check_inputs, check_writable
from overlaprl_ray.runtime.signals import Stopped, reraise_stopped
from overlaprl_ray.runtime.train import ray_running
from overlaprl_ray.tune.placement import Machine, trial_bundles
from overlaprl_ray.tune.progress import SweepProgress
from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.spec import Plan, Sweep, TrialPlan, describe, make_trial, plan_trials
from overlaprl_ray.tune.trainable import SETTINGS, close, is_finished, leave_error, tune_trainable
from overlaprl_ray.tune.tune_search import asha, check_optuna, optuna_search

SEARCH = "search"  # the name under which Tune keeps a search's state


def run_sweep(sweep: Sweep, folder: Path, console: Console) -> None:
    """Run what is left of a sweep in `folder` and write its tables. Raises `ConfigError` before anything is started,
    `RunError` at the end where a trial failed or none could be run to its end.
    """
    folder = folder.expanduser().absolute()
    plan = plan_trials(sweep, folder) if sweep.tune.search_algorithm == "basic" else Plan([], [])
    check_trials(sweep, plan, folder)
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _write_sweep(sweep, plan, folder)
            with ray_running() as context:
                if context is not None and (line := greeting(context)):
                    console.print(line, highlight=False, markup=False)
                try:
                    with reraise_stopped():
                        ended = _run(sweep, plan, folder, console)
                except Stopped:  # SIGTERM; SIGINT ends Tune's loop
                    ended = 0
            finish(sweep, plan, folder, ended, console)
    except Timeout:
        raise ConfigError(f"--dir = '{folder}': another sweep is at work there; wait for it or give another") from None


def check_trials(sweep: Sweep, plan: Plan, folder: Path) -> None:
    """Data, rewards and models of every trial, before Ray starts. Raises `ConfigError` naming the trial."""
    check_writable(f"--dir = '{folder}'", folder)
    if sweep.tune.search_algorithm == "optuna":
        check_optuna()
    trials = plan.trials or [make_trial(sweep, Point({}), folder)]
    seen: set[str] = set()
    for trial in trials:
        config = trial.config.model_copy(update={"output": trial.config.output.model_copy(update={"dir": None})})
        parts = repr((config.task, config.grpo.model_name, config.model.reference, bool(config.grpo.beta)))
        if parts not in seen:
            seen.add(parts)
            try:
                check_inputs(config)
            except ConfigError as error:
                raise ConfigError(f"trial ({describe(trial.point.settings)}): {error}") from None


def split_by_resources(sweep: Sweep, plan: Plan, machine: Machine) -> tuple[list[TrialPlan], dict[str, str]]:
    """The trials that find room, and why the others do not, by name. Raises `ConfigError` where none does."""
    possible, refused = [], {}
    for trial in plan.trials:
        try:
            trial_bundles(trial.config, sweep.tune, machine)
            possible.append(trial)
        except ConfigError as error:
            refused[trial.name] = str(error)
    if refused and not possible:
        raise ConfigError(f"no trial finds room: {next(iter(refused.values()))}")
    return possible, refused


def _write_sweep(sweep: Sweep, plan: Plan, folder: Path) -> None:
    """sweep.yaml, the sweep as resolved, and plan.json, what each trial is. A search must stay what it was."""
    text = yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False)
    file = folder / "sweep.yaml"
    if sweep.searches and file.exists() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(f"--dir = '{folder}': holds a search with other settings, see its sweep.yaml; give another")
    file.write_text(text, encoding="utf-8")
    rows = [{"trial": trial.name, "case": trial.point.case, "settings": trial.point.settings} for trial in plan.trials]
    (folder / "plan.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _run(sweep: Sweep, plan: Plan, folder: Path, console: Console) -> int:
    """Give Tune what is left to do; how many trials Tune has seen end, by now and in a search that goes on, before."""
    machine = Machine.present()
    possible, refused = split_by_resources(sweep, plan, machine)
    for trial in plan.trials:
        if trial.name in refused and not is_finished(trial.folder):
            leave_error(trial, refused[trial.name])
            console.print(f"refused {trial.name}: {refused[trial.name]}", highlight=False, markup=False)
    left = possible if sweep.searches else [trial for trial in possible if not is_finished(trial.folder)]
    total = len(possible) or sweep.tune.samples
    console.print(f"sweep {sweep.name}: {total} trials in {folder}, {len(possible) - len(left)} finished before",
                  highlight=False, markup=False)  # fmt: skip
    if not left and sweep.tune.search_algorithm == "basic":
        return 0
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failures are told in one line each
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths in a configuration mean the driver's folder
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its banner tells of paths that mean nothing here
    trainable = tune_trainable(sweep, folder, machine)
    state = folder / "tune" / SEARCH
    if sweep.searches and tune.Tuner.can_restore(str(state)):
        tuner = tune.Tuner.restore(str(state), trainable=trainable, resume_errored=True)
    else:
        cases = {trial.name: trial.point.case for trial in left if trial.point.case}
        progress = SweepProgress(sweep, folder, total, finished=len(possible) - len(left), cases=cases)
        tuner = tune.Tuner(
            trainable,
            param_space={SETTINGS: _space(sweep, left)},
            tune_config=_tune_config(sweep, folder),
            run_config=tune.RunConfig(
                name=SEARCH if sweep.searches else f"{datetime.now():%Y%m%d-%H%M%S}",
                storage_path=str(folder / "tune"),
                callbacks=[progress],
                failure_config=tune.FailureConfig(sweep.tune.max_failures, fail_fast=sweep.tune.fail_fast),
                stop=dict(sweep.tune.stop) or None,
                verbose=0,
            ),
        )
    return tuner.fit().num_terminated


def _space(sweep: Sweep, trials: list[TrialPlan]) -> Any:
    if sweep.tune.search_algorithm == "optuna":
        return {}  # Optuna has the space itself
    return tune.grid_search([trial.point.settings for trial in trials])


def _tune_config(sweep: Sweep, folder: Path) -> tune.TuneConfig:
    settings = sweep.tune
    optuna = settings.search_algorithm == "optuna"
    return tune.TuneConfig(
        num_samples=settings.samples if optuna else 1,
        search_alg=optuna_search(sweep) if optuna else None,
        scheduler=asha(sweep),
        max_concurrent_trials=settings.max_concurrent,
        trial_name_creator=partial(_name, sweep, folder),
        trial_dirname_creator=partial(_name, sweep, folder),
    )


def _name(sweep: Sweep, folder: Path, trial: Any) -> str:
    """Tune's own folders are named as ours, with Tune's id, which tells two trials of one point apart."""
    return f"{make_trial(sweep, Point(trial.config[SETTINGS]), folder).name}-{trial.trial_id}"


def finish(sweep: Sweep, plan: Plan, folder: Path, ended: int, console: Console) -> None:
    """Write the tables and show them. Raises `RunError` where trials failed, or are not finished."""
    folders = sorted(path for path in (folder / "trials").iterdir() if path.is_dir())
    for path in folders:
        close(path)
    results = load(folder)
    save(results, folder)
    (folder / "report.md").write_text(markdown(results), encoding="utf-8")
    console.print(terminal_table(results))
    for line in [f"tables: {folder}/trials.parquet, history.parquet, report.md", *results.problems]:
        console.print(line, highlight=False, markup=False)
    failed = results.trials[results.trials["status"].isin(["error", "failed"])]
    if len(failed):
        first = failed.iloc[0]
        raise RunError(
            f"{len(failed)} of {len(results.trials)} trials failed (the first: {first['trial']}: {first['error']}); "
            "the same command tries them again"
        )
    total = len(plan.trials) or sweep.tune.samples
    left = total - (ended if sweep.searches else sum(is_finished(trial.folder) for trial in plan.trials))
    if left:
        lost = " (their folders are not here: do all nodes share --dir?)" if ended and not folders else ""
        raise RunError(f"{left} of {total} trials are not finished{lost}; the same command goes on with them")
