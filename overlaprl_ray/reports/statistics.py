"""Intervals and tests over seeds: few numbers, so Student's t; nothing is claimed from one seed.

Sources: scipy's one-sample t test and its interval; S. Holm (1979), A simple sequentially rejective multiple test
procedure.

>>> paired([0.62, 0.60, 0.64], [0.55, 0.56, 0.54]).text
'+0.070 [-0.005, +0.145], p 0.056, n 3'
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; `low` and `high` are NaN from fewer than two values, `mean` from none."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Paired:
    """A mean difference over pairs; `low`, `high` and `p` are NaN from fewer than two pairs."""

    mean: float
    low: float
    high: float
    p: float
    n: int
    identical: bool  # every pair, and there is one, differs by exactly 0

    @property
    def text(self) -> str:
        """In one line."""
        if self.n == 0:
            return "no pair"
        if self.identical:
            return f"identical, n {self.n}"
        if self.n == 1:
            return f"{self.mean:+.3f}, n 1, no interval"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p {self.p:.2g}, n {self.n}"


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """95 % t interval of the mean; NaN values do not count."""
    found = paired(values, np.zeros(len(values)))
    return Interval(found.mean, found.low, found.high, found.n)


def paired(values: Sequence[float] | np.ndarray, baseline: Sequence[float] | np.ndarray) -> Paired:
    """`values` - `baseline` by pairs: 95 % interval and the paired t test's p; a pair with a NaN does not count."""
    differences = np.asarray(values, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    found = {name: column[0] for name, column in paired_columns(differences[:, None]).items()}
    numbers = {name: float(found[name]) for name in ("mean", "low", "high", "p")}
    return Paired(**numbers, n=int(found["n"]), identical=bool(found["identical"]))


def paired_columns(differences: np.ndarray) -> dict[str, np.ndarray]:
    """What `paired` says of each column of (pairs, comparisons) differences: mean, low, high, p, n, identical.

    Where all differences are one and the same there is no spread to test by: p is that of the sign test, and 1 where
    they are 0.
    """
    differences = np.where(np.isfinite(differences), differences, np.nan)
    n = np.isfinite(differences).sum(axis=0)
    enough = n > 1
    out = {name: np.full(len(n), math.nan) for name in ("mean", "low", "high", "p")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns without values, or without spread
        out["mean"] = np.nanmean(differences, axis=0) if len(differences) else out["mean"]
        if enough.any():
            test = stats.ttest_1samp(differences[:, enough], 0.0, axis=0, nan_policy="omit")
            limits = test.confidence_interval(LEVEL)
            out["low"][enough], out["high"][enough], out["p"][enough] = limits.low, limits.high, test.pvalue
        same = (n > 0) & (
            np.nanmax(differences, axis=0, initial=-np.inf) == np.nanmin(differences, axis=0, initial=np.inf)
        )
    first = np.nanmax(np.where(same, differences, -np.inf), axis=0, initial=-np.inf)
    for name in ("mean", "low", "high"):
        out[name] = np.where(same & (enough | (name == "mean")), first, out[name])
    out["p"] = np.where(same & enough, np.where(first == 0, 1.0, 2.0 ** (1.0 - n)), out["p"])
    return {**out, "n": n, "identical": same & (first == 0)}


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's adjusted p values, in the order given; a NaN stays one and does not count as a test."""
    p = np.asarray(p_values, dtype=np.float64)
    out = np.full(len(p), math.nan)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    stepwise = np.minimum(1.0, (len(order) - np.arange(len(order))) * p[order])
    out[order] = np.maximum.accumulate(stepwise)
    return out
