"""Ray Tune's searches by result: Optuna's proposals and ASHA's early stops.

TuneConfig(search_alg=optuna_search(sweep), scheduler=asha(sweep))
"""

from pathlib import Path
from typing import Any

from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tune.plan import make_trial
from overlaprl_ray.tune.search_space import Point, tune_domain
from overlaprl_ray.tune.spec import Sweep

POINT = "point"  # where a point is in Tune's config
MOST_TRIES = 1000  # proposals in a row that may be refused


class ValidOptuna(OptunaSearch):
    """Optuna, asked again where the configuration refuses its proposal; the refused one counts for it as failed."""

    def __init__(self, sweep: Sweep, space: dict[str, Any]):
        self.sweep = sweep
        tune = sweep.tune
        super().__init__(space=space, metric=tune.metric, mode=tune.goal, seed=tune.sample_seed)

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Settings for a new trial. Raises `ConfigError` where no valid proposal comes up."""
        import optuna

        for _ in range(MOST_TRIES):
            proposal: dict[str, Any] | None = super().suggest(trial_id)
            try:
                if proposal:
                    make_trial(self.sweep, Point(**proposal[POINT]), Path())
                return proposal
            except ConfigError as error:
                fault = error
            assert self._ot_study is not None
            self._ot_study.tell(self._ot_trials.pop(trial_id), state=optuna.trial.TrialState.FAIL)
        raise ConfigError(f"search: {MOST_TRIES} proposals in a row are invalid ({fault}); narrow search")


def optuna_search(sweep: Sweep) -> ValidOptuna:
    """Optuna's TPE over the sweep's space."""
    domains = {name: tune_domain(domain) for name, domain in sweep.space.shared.items()}
    return ValidOptuna(sweep, OptunaSearch.convert_search_space({POINT: {"settings": domains}}))


def asha(sweep: Sweep) -> ASHAScheduler:
    """The scheduler. It counts our steps, which continue where a resumed trial resumes."""
    steps = make_trial(sweep, Point({}), Path()).config.grpo.num_steps
    return ASHAScheduler(
        time_attr="step",
        metric=sweep.tune.metric,
        mode=sweep.tune.goal,
        max_t=steps - 1,  # the last rung, below the last step, so that whoever gets there has its last evaluation too
        stop_last_trials=False,
        grace_period=sweep.tune.asha_grace_steps,
        reduction_factor=sweep.tune.asha_reduction,
    )
