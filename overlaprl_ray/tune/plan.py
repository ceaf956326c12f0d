"""What a sweep would do, before it does it: its trials, what they reserve, how many run at once, how long it takes.

dry_run(load_sweep("tune_configs/modes.yaml"), Path("runs/modes"), Console())
"""

import json
from collections import Counter
from pathlib import Path
from statistics import median

from rich.console import Console

from overlaprl_ray.tune.placement import START_S, Bundles, Machine, schedule, trial_bundles
from overlaprl_ray.tune.progress import duration
from overlaprl_ray.tune.run import check_trials, split_by_resources
from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.spec import Plan, Sweep, TrialPlan, describe, make_trial, plan_trials
from overlaprl_ray.tune.trainable import is_finished


def dry_run(sweep: Sweep, folder: Path, console: Console) -> None:
    """Print the plan, then check what a run would check. Starts and writes nothing; raises `ConfigError`."""
    machine = Machine.reachable()
    if sweep.tune.search_algorithm == "basic":
        plan = plan_trials(sweep, folder)
        _show_trials(plan, console)
        possible, refused = split_by_resources(sweep, plan, machine)
        trials = [trial for trial in possible if not is_finished(trial.folder)]
        for name, reason in refused.items():
            console.print(f"refused {name}: {reason}", highlight=False, markup=False)
    else:
        plan = Plan([], [])
        trials = [make_trial(sweep, Point({}), folder)] * sweep.tune.samples
        for name, domain in sweep.space.shared.items():
            console.print(f"{name}: {domain.kind} {list(domain.values)}", highlight=False, markup=False)
    for line in summary_lines(sweep, plan, trials, folder, machine):
        console.print(line, highlight=False, markup=False)
    check_trials(sweep, plan, folder)


def _show_trials(plan: Plan, console: Console) -> None:
    """A line per trial, which no width of a terminal breaks."""
    for trial in plan.trials:
        state = "finished" if is_finished(trial.folder) else "to go on" if trial.folder.exists() else "new     "
        case = f"{trial.point.case}: " if trial.point.case else ""
        console.print(f"{trial.name}  {state}  {case}{describe(trial.point.settings)}", highlight=False, markup=False)
    for reason, count in Counter(reason for _, reason in plan.dropped).items():
        console.print(f"dropped {count}: {reason}", highlight=False, markup=False)


def summary_lines(sweep: Sweep, plan: Plan, trials: list[TrialPlan], folder: Path, machine: Machine) -> list[str]:
    """Counts, resources, concurrency and time, as a person reads them; `trials` are those yet to be run."""
    needs = [trial_bundles(trial.config, sweep.tune, machine) for trial in trials]
    total = len(plan.trials) or len(trials)
    lines = [f"{total} trials, {total - len(trials)} of them finished or refused; {len(plan.dropped)} points dropped"]
    kinds = Counter((trial.config.pipeline.mode, _reserved(need)) for trial, need in zip(trials, needs, strict=True))
    lines += [f"each of {count} in mode {mode} reserves {text}" for (mode, text), count in kinds.items()]
    per_step, source = seconds_per_step(sweep, plan, folder)
    seconds = [START_S + (per_step or 0.0) * trial.config.grpo.num_steps for trial in trials]
    most, whole = schedule(needs, seconds, machine, sweep.tune.max_concurrent)
    nodes = "; ".join(f"{cpus:g} CPU, {gpus:g} GPU" for cpus, gpus in machine.nodes)
    lines.append(f"at most {most} at once on {nodes}")
    if trials and per_step is None:
        lines.append("time: unknown until a trial has finished; tune.seconds_per_step gives an estimate")
    elif trials:
        lines.append(f"time: about {duration(whole)} ({per_step:.2g} s per step {source}, {START_S:g} s per start)")
    early = " (an upper limit: asha ends most trials early)" if sweep.tune.scheduler == "asha" else ""
    return [*lines[:-1], lines[-1] + early]


def _reserved(bundles: Bundles) -> str:
    parts = [" + ".join(f"{amount:g} {kind}" for kind, amount in bundle.items() if amount) for bundle in bundles]
    return f"[{'], ['.join(parts)}]"


def seconds_per_step(sweep: Sweep, plan: Plan, folder: Path) -> tuple[float | None, str]:
    """The median over the sweep's finished trials, else what its file says; and which of them it is."""
    found = []
    for path in sorted((folder / "trials").glob("*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary["status"] == "done" and summary["steps"]:
            found.append(summary["wall_s"] / summary["steps"])
    if found:
        return median(found), f"in {len(found)} finished trials"
    return sweep.tune.seconds_per_step, "by the sweep's file"
