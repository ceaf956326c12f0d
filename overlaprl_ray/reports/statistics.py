"""Intervals and tests over seeds: few numbers, so Student's t; nothing is claimed from one seed.

Sources: Student's t interval of a mean; S. Holm (1979), A simple sequentially rejective multiple test procedure.

>>> paired([0.62, 0.60, 0.64], [0.55, 0.56, 0.54]).text
'+0.070 [-0.005, +0.145], p 0.056, n 3'
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special, stats

LEVEL = 0.95
BOOTSTRAP_FROM = 20  # seeds: at 5 a nominal 95 % bootstrap interval covers the truth about 83 times in 100


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


def t_quantile(n: int) -> float:
    """What the standard error of n values' mean is multiplied by for half a 95 % interval."""
    return float(special.stdtrit(n - 1, (1 + LEVEL) / 2))  # as stats.t.ppf, without its tenth of a millisecond


def interval(values: Sequence[float] | np.ndarray, method: Literal["t", "bootstrap"] = "t") -> Interval:
    """95 % interval of the mean; NaN values do not count.

    Raises `ValueError` for a bootstrap (BCa) of fewer than 20 values, whose coverage is not what it says.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    n = len(known)
    mean = float(known.mean()) if n else math.nan
    if method == "bootstrap" and n < BOOTSTRAP_FROM:
        raise ValueError(f"bootstrap of {n} values: covers too little below {BOOTSTRAP_FROM}; use method='t'")
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    if np.ptp(known) == 0:
        return Interval(float(known[0]), float(known[0]), float(known[0]), n)
    if method == "bootstrap":
        found = stats.bootstrap((known,), np.mean, confidence_level=LEVEL, rng=np.random.default_rng(0))
        return Interval(mean, float(found.confidence_interval.low), float(found.confidence_interval.high), n)
    half = t_quantile(n) * float(known.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired(
    values: Sequence[float] | np.ndarray,
    baseline: Sequence[float] | np.ndarray,
    method: Literal["t", "bootstrap"] = "t",
) -> Paired:
    """`values` - `baseline`, pair by pair: 95 % interval and the paired t test's p; a pair with a NaN does not count.

    Where all differences are one and the same there is no spread to test by: p is that of the sign test, and 1 where
    they are 0. With `method` bootstrap the interval is that of `interval`, p still the t test's.
    """
    differences = np.asarray(values, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    found = {name: column[0] for name, column in paired_columns(differences[:, None]).items()}
    if method == "bootstrap":
        other = interval(differences, method)
        found |= {"low": other.low, "high": other.high}
    numbers = {name: float(found[name]) for name in ("mean", "low", "high", "p")}
    return Paired(**numbers, n=int(found["n"]), identical=bool(found["identical"]))


def paired_columns(differences: np.ndarray) -> dict[str, np.ndarray]:
    """What `paired` says of each column of (pairs, comparisons) differences: mean, low, high, p, n, identical."""
    known = np.isfinite(differences)
    n = known.sum(axis=0)
    filled = np.where(known, differences, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = filled.sum(axis=0) / n
        centred = np.where(known, differences - mean, 0.0)
        error = np.sqrt((centred**2).sum(axis=0) / (n - 1) / n)  # of the mean
        p = 2 * special.stdtr(n - 1.0, -np.abs(mean) / error)
        half = special.stdtrit(n - 1.0, (1 + LEVEL) / 2) * error
    highest = np.where(known, differences, -np.inf).max(axis=0, initial=-np.inf)
    lowest = np.where(known, differences, np.inf).min(axis=0, initial=np.inf)
    same = (n > 0) & (highest == lowest)
    mean, half = np.where(same, highest, mean), np.where(same, 0.0, half)
    p = np.where(same, np.where(highest == 0, 1.0, 2.0 ** (1.0 - n)), p)
    half, p = np.where(n < 2, np.nan, half), np.where(n < 2, np.nan, p)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "n": n, "identical": same & (highest == 0)}


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's adjusted p values, in the order given; a NaN stays one and does not count as a test."""
    p = np.asarray(p_values, dtype=np.float64)
    out = np.full(len(p), math.nan)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, float((len(order) - place) * p[index])))
        out[index] = highest
    return out
