"""What a run had reached at a budget of steps, tokens or seconds, and when it reached a target.

A history metric counts as its mean over the last ten steps; held-out accuracy as measured, straight lines in between.

    values_at(results, "reward", "seconds", 60.0)      # one number per trial
    to_target(results, 0.6)                            # steps, tokens, seconds per trial
"""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import pandas as pd

from overlaprl_ray.reports.loading import Results

Budget = Literal["steps", "tokens", "seconds"]
COLUMNS: dict[str, str] = {"steps": "step", "tokens": "tokens", "seconds": "wall_s"}
WINDOW = 10  # steps that one value of a history metric is the mean of, as in reward_last_10
Curve = tuple[np.ndarray, np.ndarray]  # budget spent, rising; the metric there


def curves(results: Results, metric: str, budget: Budget = "steps") -> dict[str, Curve]:
    """Each trial's metric against what it had spent: `accuracy` (held out) or any column of `history`.

    Seconds are the run's wall clock; before the first step nothing was spent. A trial without the metric has no curve.
    Raises `ValueError` for an unknown metric or budget.
    """
    if budget not in COLUMNS:
        raise ValueError(f"budget = '{budget}': must be one of {', '.join(COLUMNS)}")
    history = results.history
    if metric == "accuracy":
        spent = history[list({"trial": 0, "step": 0, COLUMNS[budget]: 0})]
        table = results.evals[["trial", "step", "accuracy"]].merge(spent, on=["trial", "step"], how="left")
        table.loc[table["step"] == 0, COLUMNS[budget]] = 0.0
        table = table.sort_values(["trial", "step"])
    elif metric not in history and len(history):
        known = ", ".join(c for c in history.columns if c not in ("trial", "step"))
        raise ValueError(f"metric = '{metric}': must be accuracy or one of {known}")
    else:
        table = history.sort_values(["trial", "step"])
        if len(table):
            groups = table.groupby("trial", observed=True)[metric]
            table = table.assign(**{metric: groups.rolling(WINDOW, min_periods=1).mean().to_numpy()})
    points = table.reindex(columns=["trial", COLUMNS[budget], metric]).set_axis(["trial", "x", "y"], axis=1).dropna()
    return {str(trial): (rows["x"].to_numpy(np.float64), rows["y"].to_numpy(np.float64))
            for trial, rows in points.groupby("trial", observed=True)}  # fmt: skip


def common_budget(found: Mapping[str, Curve]) -> float:
    """The most that every curve has spent; NaN without curves."""
    return min((float(x[-1]) for x, _ in found.values()), default=math.nan)


def values_at(results: Results, metric: str, budget: Budget, at: float | None = None) -> pd.Series:
    """The metric of each trial at a budget (default: the most that all of them have spent); NaN beyond a trial's end.

    Before its first value a curve counts as that value.
    """
    found = curves(results, metric, budget)
    at = common_budget(found) if at is None else at
    values = {trial: float(np.interp(at, x, y, right=math.nan)) for trial, (x, y) in found.items()}
    return pd.Series(values, dtype="float64").reindex(results.trials["trial"].to_list())


def to_target(results: Results, target: float, metric: str = "reward") -> pd.DataFrame:
    """Steps, tokens and seconds until the metric first reached a target, by trial; NaN where it never did.

    A history metric has reached it when the mean of ten steps has: the first nine steps have no such mean yet.
    """
    skip = 0 if metric == "accuracy" else WINDOW - 1
    out: dict[str, dict[str, float]] = {}
    for budget in get_args(Budget):
        hits = {trial: x[skip:][y[skip:] >= target] for trial, (x, y) in curves(results, metric, budget).items()}
        out[budget] = {trial: float(hit[0]) for trial, hit in hits.items() if len(hit)}
    return pd.DataFrame(out, index=results.trials["trial"].to_list(), columns=list(COLUMNS), dtype="float64")
