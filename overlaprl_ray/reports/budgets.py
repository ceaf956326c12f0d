"""What a run had reached at a budget of steps, tokens or seconds, and when it reached a target.

A history metric counts as its mean over the last ten steps; held-out accuracy as measured, straight lines in between.

    values_at(results, "reward", "seconds", 60.0)      # one number per trial
    to_target(results, 0.6)                            # steps, tokens, seconds per trial
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pandas as pd

from overlaprl_ray.reports.loading import Results

Budget = Literal["steps", "tokens", "seconds"]
COLUMNS: dict[str, str] = {"steps": "step", "tokens": "tokens", "seconds": "wall_s"}
WINDOW = 10  # steps that one value of a history metric is the mean of, as in reward_last_10
Curve = tuple[np.ndarray, np.ndarray]  # budget spent, rising; the metric there


def curves(results: Results, metric: str, budget: Budget = "steps") -> dict[str, Curve]:
    """Each trial's metric against what it had spent: `accuracy` (held out) or any column of `history`.

    Seconds are the run's wall clock. A trial without the metric has no curve. Raises `ValueError` for an unknown metric
    or budget.
    """
    if budget not in COLUMNS:
        raise ValueError(f"budget = '{budget}': must be one of {', '.join(COLUMNS)}")
    source = results.evals if metric == "accuracy" else results.history
    if source.empty:
        return {}
    if metric != "accuracy" and metric not in source:
        known = ", ".join(c for c in source.columns if c not in ("trial", "step"))
        raise ValueError(f"metric = '{metric}': must be accuracy or one of {known}")
    table = source[list(dict.fromkeys(["trial", "step", *({COLUMNS[budget]} & {*source.columns}), metric]))]
    if metric == "accuracy" and budget != "steps":  # an evaluation has cost what its weights had
        table = table.merge(results.history[["trial", "step", COLUMNS[budget]]], on=["trial", "step"], how="left")
    out = {}
    for trial, rows in table.sort_values("step", kind="stable").groupby("trial", observed=True, sort=False):
        spent, values = rows[COLUMNS[budget]].astype("float64"), rows[metric].astype("float64")
        if metric == "accuracy":
            spent = spent.where(rows["step"] > 0, 0.0)
        else:
            values = values.rolling(WINDOW, min_periods=1).mean()
        whole = np.isfinite(spent) & np.isfinite(values)
        if whole.any():
            out[str(trial)] = spent[whole].to_numpy(), values[whole].to_numpy()
    return {trial: out[trial] for trial in results.trials["trial"] if trial in out}


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
    for budget in COLUMNS:
        found = curves(results, metric, budget)  # type: ignore[arg-type]
        hits = {trial: x[skip:][y[skip:] >= target] for trial, (x, y) in found.items()}
        out[budget] = {trial: float(hit[0]) for trial, hit in hits.items() if len(hit)}
    return pd.DataFrame(out, index=results.trials["trial"].to_list(), columns=list(COLUMNS), dtype="float64")
