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
    table = _accuracy(results, budget) if metric == "accuracy" else _history(results, metric, budget)
    table = table[np.isfinite(table["spent"]) & np.isfinite(table["value"])]
    if table.empty:
        return {}
    names, starts = np.unique(table["trial"].to_numpy(), return_index=True)  # rows of a trial stand together
    spent, values = (np.split(table[name].to_numpy(), starts[1:]) for name in ("spent", "value"))
    known_as = results.trials["trial"].to_list()
    return {known_as[code]: (x, y) for code, x, y in zip(names, spent, values, strict=True)}


def _sorted(results: Results, table: pd.DataFrame) -> pd.DataFrame:
    """Rows by trial (as its place among the trials) and step; those of no known trial are left out."""
    codes = pd.Categorical(table["trial"].astype("str"), categories=results.trials["trial"]).codes
    order = np.lexsort((table["step"].to_numpy(np.float64), codes))
    return table.assign(trial=codes).iloc[order[codes[order] >= 0]]


def _history(results: Results, metric: str, budget: Budget) -> pd.DataFrame:
    columns = list(dict.fromkeys(["trial", "step", COLUMNS[budget], metric]))
    table = _sorted(results, results.history[columns])
    values = trailing_mean(table[metric].to_numpy(np.float64), table["trial"].to_numpy())
    return pd.DataFrame({"trial": table["trial"], "spent": table[COLUMNS[budget]].astype("float64"), "value": values})


def trailing_mean(values: np.ndarray, group: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the last `window` values of the same group, fewer at its start; NaN values do not count.

    `group` (N,) has equal entries side by side. Sums are taken afresh for each value, so no error piles up.
    """
    total, count = np.zeros(len(values)), np.zeros(len(values))
    for back in range(min(window, len(values))):
        here, there = slice(back, None), slice(0, len(values) - back)
        use = (group[here] == group[there]) & np.isfinite(values[there])
        total[here] += np.where(use, values[there], 0.0)
        count[here] += use
    with np.errstate(invalid="ignore"):
        return total / count


def _accuracy(results: Results, budget: Budget) -> pd.DataFrame:
    """Evaluations placed at what had been spent when their weights existed; before the first step nothing had."""
    table = _sorted(results, results.evals[["trial", "step", "accuracy"]])
    spent = table["step"].to_numpy(np.float64)
    if budget != "steps":
        column = COLUMNS[budget]
        history = _sorted(results, results.history[["trial", "step", column]])
        found = table.merge(history, on=["trial", "step"], how="left")[column].to_numpy(np.float64)
        spent = np.where(spent > 0, found, 0.0)
    return pd.DataFrame(
        {"trial": table["trial"].to_numpy(), "spent": spent, "value": table["accuracy"].to_numpy(np.float64)}
    )


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
