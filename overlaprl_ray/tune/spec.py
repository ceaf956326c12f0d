"""A sweep's YAML file, read and checked: `base`, `search` and `tune`. What it expands to is in plan.py.

sweep = load_sweep("tune_configs/thresholds.yaml", overrides={"grpo.num_steps": 100}, seeds=[0, 1])
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from overlaprl_ray.config.cli import build_config, fields, merge, read_yaml, suggest, validate
from overlaprl_ray.config.grpo import Count, Group, Positive, Seed, Whole
from overlaprl_ray.config.yaml_settings import nested
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tune.search_space import CASES, SearchSpace, is_domain, parse_search

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
    scheduler: Literal["fifo", "asha"] = Field("fifo", description="asha = stop the worse ones early (to explore, not "
                                               "to compare: it cuts slow starters)")  # fmt: skip
    asha_grace_steps: Count = Field(20, description="asha: steps before a trial can be stopped, >= 1")
    asha_reduction: int = Field(3, ge=2, le=100, description="asha: 1 in so many continues at each rung, 2 to 100")
    metric: str = Field("eval/accuracy", description="what optuna and asha go by: a number of metrics.jsonl")
    goal: Literal["max", "min"] = Field("max", description="whether more or less of the metric is better")
    max_concurrent: Count | None = Field(None, description="trials at once, >= 1; null = as many as fit")
    cpus_per_trial: Positive | None = Field(None, description="CPU cores reserved per trial, > 0; null = threads × 1 "
                                            "(sync, serial) or × 2, without a GPU")  # fmt: skip
    max_failures: Whole = Field(0, description="retries of a failed trial from its checkpoint, >= 0")
    fail_fast: bool = Field(False, description="end the whole sweep at the first failed trial")
    stop: dict[str, float] = Field({}, description="metric: value from which on a trial counts as finished")
    best_of: str | None = Field(None, description="folder of a finished sweep: run only the values of best_over that "
                                "were best in it, chosen for all other settings apart")  # fmt: skip
    best_over: list[str] = Field(["grpo.lr"], description="best_of: the settings that are chosen, by the mean accuracy "
                                 "over all evaluations after step 0 and all seeds")  # fmt: skip
    serial: bool = Field(False, description="run each trial in one process without actors (same numbers, other times)")


class Sweep(Group):
    """One sweep file; once loaded, `name` is set and `base` holds values."""

    name: str | None = Field(None, pattern=r"^[\w.-]+$", description="letters, digits, _ . -; null = the file's name")
    base: dict[str, Any] | str = Field({}, description="settings of every trial, or a YAML file of them")
    search: dict[str, Any] = Field({}, description="dotted names with grid, choice, uniform, ...; and cases")
    tune: TuneSettings = TuneSettings()

    @property
    def space(self) -> SearchSpace:
        """`search`, parsed."""
        return parse_search(self.search)

    @property
    def optuna(self) -> bool:
        """Whether Optuna proposes the trials."""
        return self.tune.search_algorithm == "optuna"

    @property
    def searches(self) -> bool:
        """Whether results decide what is run: then resuming needs Tune's own state."""
        return self.optuna or self.tune.scheduler == "asha"


def load_sweep(path: str | Path, overrides: dict[str, Any] | None = None, seeds: Sequence[int] | None = None) -> Sweep:
    """A sweep from its file. `overrides`: settings of `base` by dotted name, or `tune.*`; a setting that `search`
    varies is fixed by it, and a value such as {grid: [1, 2]} varies it. Raises `ConfigError`, one line.
    """
    sweep = validate(Sweep, read_yaml(path), str(path))
    values = sweep.model_dump()
    values["name"] = sweep.name or Path(path).stem
    values["base"] = nested(read_yaml(Path(path).parent / sweep.base) if isinstance(sweep.base, str) else sweep.base)
    given = {**(overrides or {}), **({"seed": {"grid": list(seeds)}} if seeds else {})}
    for name, value in given.items():
        _override(values, name, value)
    try:
        sweep = validate(Sweep, values, "sweep")
        check_sweep(sweep)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return sweep


def _override(values: dict[str, Any], name: str, value: Any) -> None:
    if name.startswith("tune."):
        values["tune"][name.removeprefix("tune.")] = value
        return
    owner = next((case for case in values["search"].get(CASES, []) if name in case), None)
    if owner:
        raise ConfigError(f"command line: {name} is set by search.cases.{owner.get('name')}; change it in the file")
    values["search"].pop(name, None)
    if is_domain(value):
        values["search"][name] = value
    else:
        values["base"] = merge(values["base"], {name: value})


def check_sweep(sweep: Sweep) -> None:
    """Everything that shows before trials are expanded. Raises `ConfigError`."""
    assert isinstance(sweep.base, dict)
    base = build_config(sweep.base, "base")
    if base.output.dir is not None:
        raise ConfigError(f"base.output.dir = '{base.output.dir}': each trial gets its own; give --dir for the sweep")
    tune, space = sweep.tune, sweep.space
    for name in [tune.metric, *tune.stop]:
        if name not in METRICS:
            raise ConfigError(f"tune: unknown metric '{name}'; {suggest(name, list(METRICS))}")
    for name in tune.best_over:
        if name not in (known := [setting for setting, _ in fields()]):
            raise ConfigError(f"tune.best_over: unknown setting '{name}'; {suggest(name, known)}")
    if tune.fail_fast and tune.max_failures:
        raise ConfigError(
            f"tune.fail_fast = true cannot be combined with tune.max_failures = {tune.max_failures}; drop one"
        )
    if tune.scheduler == "asha" and tune.asha_grace_steps >= base.grpo.num_steps:
        raise ConfigError(
            f"tune.asha_grace_steps = {tune.asha_grace_steps} must be below grpo.num_steps = {base.grpo.num_steps}"
        )
    if tune.samples > 1 and not space.random:
        raise ConfigError(f"tune.samples = {tune.samples}: nothing in search is random; repeat with --seeds")
    if sweep.optuna:
        _check_optuna(space)


def _check_optuna(space: SearchSpace) -> None:
    """Optuna proposes values itself: it takes neither grids nor cases."""
    grids = [f"search.{name} is a grid" for name, domain in space.shared.items() if "grid" in domain]
    faults = [*grids, *(["cases are a grid"] if space.cases else []), *([] if space.shared else ["search is empty"])]
    if faults:
        raise ConfigError(f"tune.search_algorithm = optuna: {faults[0]}; give choice, uniform, loguniform or randint")
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("tune.search_algorithm = optuna: not installed; pip install 'overlaprl_ray[optuna]'")
