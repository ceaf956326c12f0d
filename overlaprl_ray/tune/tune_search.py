"""Searches by result: Optuna's suggestions within a sweep's constraints, and ASHA's early stops.

TuneConfig(search_alg=optuna_search(sweep), scheduler=asha(sweep))
"""

import importlib.util
from pathlib import Path
from typing import Any

from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tune.constraints import Constraint
from overlaprl_ray.tune.search_space import Domain, Point
from overlaprl_ray.tune.spec import Sweep, broken_constraint, make_trial
from overlaprl_ray.tune.trainable import SETTINGS

MOST_TRIES = 1000  # suggestions in a row that may be refused


class ConstrainedOptuna(OptunaSearch):
    """Optuna, asked again where a suggestion makes no valid trial; the refused one is told to it as failed."""

    def __init__(self, sweep: Sweep, space: dict[str, Any]):
        self.sweep = sweep
        tune = sweep.tune
        super().__init__(space=space, metric=tune.metric, mode=tune.goal, seed=tune.sample_seed)

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Settings for a new trial. Raises `ConfigError` where no valid one comes up."""
        import optuna

        for _ in range(MOST_TRIES):
            found: dict[str, Any] | None = super().suggest(trial_id)
            fault = self._fault(found[SETTINGS]) if found else None
            if fault is None:
                return found
            assert self._ot_study is not None
            self._ot_study.tell(self._ot_trials.pop(trial_id), state=optuna.trial.TrialState.FAIL)
        raise ConfigError(f"search: {MOST_TRIES} suggestions in a row make no valid trial ({fault}); narrow search")

    def _fault(self, settings: dict[str, Any]) -> str | None:
        broken = broken_constraint(self.sweep, [Constraint(text) for text in self.sweep.constraints], settings)
        if broken is None:
            try:
                make_trial(self.sweep, Point(settings), Path())
            except ConfigError as error:
                return str(error)
        return broken


def optuna_search(sweep: Sweep) -> ConstrainedOptuna:
    """Optuna's TPE over the sweep's space."""
    space = {f"{SETTINGS}/{name}": _distribution(domain) for name, domain in sweep.space.shared.items()}
    return ConstrainedOptuna(sweep, space)


def check_optuna() -> None:
    """Refuse a search by Optuna where it is not installed. Raises `ConfigError`."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("tune.search_algorithm = optuna: is not installed; pip install 'overlaprl_ray[optuna]'")


def _distribution(domain: Domain) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high = domain.values[0], domain.values[-1]
    match domain.kind:
        case "uniform" | "loguniform":
            return FloatDistribution(low, high, log=domain.kind == "loguniform")
        case "randint":
            return IntDistribution(low, high - 1)
    return CategoricalDistribution(domain.values)


def asha(sweep: Sweep) -> ASHAScheduler | None:
    """The scheduler, where the sweep asks for one. It counts our steps, which go on where a resumed trial goes on."""
    if sweep.tune.scheduler == "fifo":
        return None
    steps = make_trial(sweep, Point({}), Path()).config.grpo.num_steps
    return ASHAScheduler(
        time_attr="step",
        metric=sweep.tune.metric,
        mode=sweep.tune.goal,
        max_t=steps - 1,  # the last rung, and below the last step, so that who gets there has its last evaluation too
        stop_last_trials=False,
        grace_period=sweep.tune.asha_grace_steps,
        reduction_factor=sweep.tune.asha_reduction,
    )
