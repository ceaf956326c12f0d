"""A sweep as data: its YAML file validated, and expanded to trials that are named by what they are.

A trial's name is the hash of its resolved configuration, so the same sweep called again finds what it has done, and
more seeds or values only add trials. Running them is `sweeps/run.py`'s.

    sweep = load_sweep("tune_configs/thresholds.yaml")
    plan = plan_trials(sweep, Path("runs/thresholds"))
    [trial.name for trial in plan.trials], plan.dropped
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import build_config, fields, merge, read_yaml, suggest, validate
from overlaprl_ray.config.grpo import Count, Group, Positive, Seed, Whole
from overlaprl_ray.config.identity import config_hash, flatten
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tune.constraints import Constraint
from overlaprl_ray.tune.search_space import CASES, Point, SearchSpace, is_domain, parse_search

MOST_TRIALS = 10_000  # a slip in a grid should not become a million folders

# what a scheduler, a search or a stop can go by: numbers that every step reports
METRICS = ("eval/accuracy", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length",
           "completions/clipped_ratio", "loss", "policy_loss", "kl_ref", "entropy", "grad_norm", "staleness/kl",
           "staleness/weight", "staleness/frac_fresh", "staleness/frac_stale", "staleness/frac_discarded",
           "step", "version", "tokens", "samples", "wall_s", "tokens_per_s")  # fmt: skip


class TuneSettings(Group):
    """How the trials are run."""

    samples: Count = Field(1, description="draws of what is random in search, >= 1; each is crossed with the grid")
    sample_seed: Seed = Field(0, description="seed of those draws, and of Optuna's, 0 to 2^31 - 1")
    search_algorithm: Literal["basic", "optuna"] = Field("basic", description="basic = grids and random draws")
    scheduler: Literal["fifo", "asha"] = Field("fifo", description="asha = stop the worse ones early (explore, don't "
                                               "compare: it cuts slow starters)")  # fmt: skip
    asha_grace_steps: Count = Field(20, description="asha: steps before a trial can be stopped, >= 1")
    asha_reduction: int = Field(3, ge=2, le=100, description="asha: 1 of so many goes on at each rung, 2 to 100")
    metric: str = Field("eval/accuracy", description="what optuna and asha go by: a number of metrics.jsonl")
    goal: Literal["max", "min"] = Field("max", description="whether more or less of the metric is better")
    max_concurrent: Count | None = Field(None, description="trials at once, >= 1; null = as many as fit")
    cpus_per_trial: Positive | None = Field(None, description="CPU cores reserved per trial, > 0; null = threads × 1 "
                                            "(sync, serial) or × 2, without a GPU")  # fmt: skip
    max_failures: Whole = Field(0, description="retries of a failed trial from its checkpoint, >= 0")
    fail_fast: bool = Field(False, description="end the whole sweep at the first failed trial")
    stop: dict[str, float] = Field({}, description="metric: value from which on a trial counts as finished")
    serial: bool = Field(False, description="run each trial in one process without actors (same numbers, other times)")
    seconds_per_step: Positive | None = Field(None, description="for the estimate of time until trials have ended, > 0")


class Sweep(Group):
    """One sweep file, with `base` resolved to values."""

    name: str | None = Field(None, pattern=r"^[\w.-]+$", description="letters, digits, _ . -; null = the file's name")
    base: dict[str, Any] | str = Field({}, description="settings of every trial, or a YAML file of them")
    search: dict[str, Any] = Field({}, description="dotted names with grid, choice, uniform, ...; and cases")
    constraints: list[str] = Field([], description="conditions that a trial must meet to be run")
    tune: TuneSettings = TuneSettings()

    @property
    def space(self) -> SearchSpace:
        """`search`, parsed."""
        return parse_search(self.search)

    @property
    def searches(self) -> bool:
        """Whether Tune decides, by results, what is run: then its own state is needed to go on."""
        return self.tune.search_algorithm == "optuna" or self.tune.scheduler == "asha"


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
    """The trials of a sweep in the order of starting, and the points left out with the reason."""

    trials: list[TrialPlan]
    dropped: list[tuple[Point, str]]


def describe(settings: Mapping[str, Any]) -> str:
    """Settings on one line."""
    return ", ".join(f"{name}={_brief(value)}" for name, value in settings.items()) or "base"


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- reading ----


def load_sweep(
    path: str | Path, overrides: Mapping[str, Any] | None = None, seeds: Sequence[int] | None = None
) -> Sweep:
    """A sweep from its file. `overrides`: settings of `base` by dotted name, or `tune.*`; a setting that `search`
    varies is fixed by it, and a value such as {grid: [1, 2]} varies it. Raises `ConfigError`, one line.
    """
    sweep = validate(Sweep, read_yaml(path), str(path))
    values = sweep.model_dump()
    values["name"] = sweep.name or Path(path).stem
    if isinstance(sweep.base, str):
        values["base"] = read_yaml(Path(path).parent / sweep.base)
    given = {**(overrides or {}), **({"seed": {"grid": list(seeds)}} if seeds else {})}
    for name, value in given.items():
        _override(values, name, value)
    try:
        return check_sweep(validate(Sweep, values, "sweep"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _override(values: dict[str, Any], name: str, value: Any) -> None:
    settings, tune = dict(fields()), {f"tune.{name}": field for name, field in fields(TuneSettings)}
    if name in tune:
        values["tune"][name.removeprefix("tune.")] = value
        return
    if name not in settings:
        raise ConfigError(f"command line: unknown setting '{name}'; {suggest(name, [*settings, *tune])}")
    owner = next((case for case in values["search"].get(CASES, []) if name in case), None)
    if owner:
        raise ConfigError(f"command line: {name} is set by search.cases.{owner.get('name')}; change it in the file")
    values["search"] = {other: domain for other, domain in values["search"].items() if other != name}
    if is_domain(value):
        values["search"][name] = value
    else:
        values["base"] = merge(values["base"], {name: value})


def check_sweep(sweep: Sweep) -> Sweep:
    """Everything that shows before trials are expanded. Raises `ConfigError`."""
    assert isinstance(sweep.base, dict)
    base = build_config(sweep.base, "base")
    if base.output.dir is not None:
        raise ConfigError(f"base.output.dir = '{base.output.dir}': each trial gets its own; give --dir for the sweep")
    tune, space = sweep.tune, sweep.space
    for name in [tune.metric, *tune.stop]:
        if name not in METRICS:
            raise ConfigError(f"tune: unknown metric '{name}'; {suggest(name, list(METRICS))}")
    if tune.fail_fast and tune.max_failures:
        raise ConfigError(f"tune.fail_fast = true goes not with tune.max_failures = {tune.max_failures}; drop one")
    if tune.scheduler == "asha" and tune.asha_grace_steps >= base.grpo.num_steps:
        raise ConfigError(
            f"tune.asha_grace_steps = {tune.asha_grace_steps} must be below grpo.num_steps = {base.grpo.num_steps}"
        )
    if tune.samples > 1 and not space.random:
        raise ConfigError(
            f"tune.samples = {tune.samples}: nothing in search is random; repeat by seed: {{grid: [...]}}"
        )
    if tune.search_algorithm == "optuna":
        grids = [name for name, domain in space.shared.items() if domain.kind == "grid"]
        if grids or space.cases or not space.shared:
            fault = (
                f"search.{grids[0]} is a grid" if grids else "cases are a grid" if space.cases else "search is empty"
            )
            raise ConfigError(f"tune.search_algorithm = optuna: {fault}; give choice, uniform, loguniform or randint")
    for text in sweep.constraints:
        Constraint(text)
    return sweep


# ---- expanding ----


def plan_trials(sweep: Sweep, folder: Path) -> Plan:
    """Every trial of a fixed sweep, and the points that constraints (or an equal trial) leave out.

    Raises `ConfigError` where a point that meets the constraints is no valid configuration, and where none is left.
    """
    constraints = [Constraint(text) for text in sweep.constraints]
    trials: dict[str, TrialPlan] = {}
    dropped: list[tuple[Point, str]] = []
    for count, point in enumerate(sweep.space.points(sweep.tune.samples, sweep.tune.sample_seed)):
        if count >= MOST_TRIALS:
            raise ConfigError(f"search: more than {MOST_TRIALS:,} trials; thin the grids or lower tune.samples")
        broken = broken_constraint(sweep, constraints, point.settings)
        if broken:
            dropped.append((point, f"not {broken}"))
            continue
        trial = make_trial(sweep, point, folder)
        if trial.name in trials:
            dropped.append((point, f"the same run as {describe(trials[trial.name].point.settings)}"))
        trials.setdefault(trial.name, trial)
    if not trials:
        raise ConfigError(f"constraints: leave none of {len(dropped)} trials ({dropped[0][1]}); loosen them")
    return Plan(list(trials.values()), dropped)


def make_trial(sweep: Sweep, point: Point, folder: Path) -> TrialPlan:
    """The trial of a point. Raises `ConfigError` where its settings do not go together."""
    assert isinstance(sweep.base, dict)
    what = f"{point.case}: " if point.case else ""
    config = build_config(merge(sweep.base, dict(point.settings)), f"trial ({what}{describe(point.settings)})")
    name = config_hash(config)
    output = config.output.model_copy(update={"dir": str(folder.absolute() / "trials" / name)})
    return TrialPlan(name, point, config.model_copy(update={"output": output}))


def broken_constraint(sweep: Sweep, constraints: Sequence[Constraint], settings: Mapping[str, Any]) -> str | None:
    """The first condition that settings break, with the values it names; None if they break none."""
    if not constraints:
        return None
    assert isinstance(sweep.base, dict)
    values = _resolved(sweep.base, settings)
    for constraint in constraints:
        if not constraint.holds(values):
            return f"{constraint.text} ({describe({name: values[name] for name in sorted(constraint.names)})})"
    return None


def _resolved(base: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by dotted name, also where together they are no valid configuration (yet to be dropped)."""
    plain = dict(flatten(build_config(copy.deepcopy(base)).model_dump()))
    try:
        return dict(flatten(build_config(merge(base, dict(settings))).model_dump()))
    except ConfigError:
        return {**plain, **settings}
