"""The trials of a sweep, named by what they are, and the points that are dropped, with the reason.

A trial's name is the hash of its resolved configuration, so the same sweep called again recognises what it has done,
and more seeds or values only add trials.

    plan = plan_trials(load_sweep("tune_configs/thresholds.yaml"), Path("runs/thresholds"))
    [trial.name for trial in plan.trials], plan.dropped
"""

import dataclasses
from datetime import date
from pathlib import Path

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import build_config, merge
from overlaprl_ray.config.identity import check_run, config_hash
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runtime.fingerprint import changed_inputs, task_inputs
from overlaprl_ray.runtime.inputs import check_inputs
from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.spec import Sweep

DAY = "day.txt"  # in a sweep's folder
MOST_POINTS = 10_000  # a slip in a grid should not become a million folders


@dataclasses.dataclass(frozen=True)
class TrialPlan:
    """One trial: its name, what sets it apart, and its whole configuration with the folder in it."""

    name: str
    point: Point
    config: ExperimentConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(str(self.config.output.dir))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The trials of a sweep in the order of starting, the points left out with the reason, and what else is to be said.

    Empty for a search by Optuna, which makes up its points as it goes.
    """

    trials: list[TrialPlan]
    dropped: list[tuple[Point, str]]
    notes: tuple[str, ...] = ()  # what was chosen, and by what
    changed: list[str] = dataclasses.field(default_factory=list)  # see `check_trials`

    def dropped_lines(self) -> list[str]:
        """A line per reason, with the first point it applies to."""
        by_reason: dict[str, list[Point]] = {}
        for point, reason in self.dropped:
            by_reason.setdefault(reason, []).append(point)
        return [
            f"dropped {len(points)} ({points[0]}{', ...' if len(points) > 1 else ''}): {reason}"
            for reason, points in by_reason.items()
        ]


def plan_trials(sweep: Sweep, folder: Path) -> Plan:
    """Every trial of a fixed sweep; dropped are points that the configuration refuses or that repeat another trial.

    Raises `ConfigError` where no trial is left.
    """
    if sweep.optuna:
        return Plan([], [])
    trials: dict[str, TrialPlan] = {}
    dropped: list[tuple[Point, str]] = []
    for count, point in enumerate(sweep.space.points(sweep.tune.samples, sweep.tune.sample_seed)):
        if count >= MOST_POINTS:
            raise ConfigError(f"search: more than {MOST_POINTS:,} points; thin the grids or lower tune.samples")
        try:
            trial = make_trial(sweep, point, folder)
        except ConfigError as error:
            dropped.append((point, str(error).removeprefix("trial: ")))
            continue
        if trial.name in trials:
            dropped.append((point, f"the same run as {trials[trial.name].point}"))
        trials.setdefault(trial.name, trial)
    if not trials:
        point, reason = dropped[0]
        raise ConfigError(f"search: none of {len(dropped)} points is valid, the first ({point}): {reason}")
    return Plan(list(trials.values()), dropped)


def make_trial(sweep: Sweep, point: Point, folder: Path) -> TrialPlan:
    """The trial of a point. Raises `ConfigError` where the configuration refuses its settings together."""
    assert isinstance(sweep.base, dict)
    config = build_config(merge(sweep.base, point.settings), "trial")
    name = config_hash(config)
    config = config.with_setting("output.dir", str(folder.absolute() / "trials" / name))
    return TrialPlan(name, point, config.with_setting("task.date", config.task.date or sweep_day(folder)))


def sweep_day(folder: Path) -> date | None:
    """The day that the chat templates of a sweep's trials see: its first one; None before that."""
    return date.fromisoformat((folder / DAY).read_text().strip()) if (folder / DAY).exists() else None


def check_trials(trials: list[TrialPlan]) -> list[str]:
    """Data, rewards and models of every trial, before Ray starts. Raises `ConfigError` naming the trial.

    Trials of another algorithm in the sweep's folder are refused too: its tables would mix them with these. Returns a
    line about each trial that was begun with other data or other code of rewards.
    """
    for place in sorted(trials[0].folder.parent.glob("*/config.yaml")) if trials else []:
        check_run(place.parent)
    checked: dict[str, dict[str, str]] = {}
    lines = []
    for trial in trials:
        config = trial.config.with_setting("output.dir", None)
        key = repr((config.task, config.grpo.model_name, config.model.reference, bool(config.grpo.beta)))
        if key not in checked:
            try:
                checked[key] = task_inputs(config, check_inputs(config))
            except ConfigError as error:
                raise ConfigError(f"trial ({trial.point}): {error}") from None
        if changed := changed_inputs(trial.folder, checked[key]):
            lines.append(f"{trial.name} has other inputs ({', '.join(changed)}); remove its folder to run it anew")
    return lines
