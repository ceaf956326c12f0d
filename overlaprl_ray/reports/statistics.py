"""Intervals and tests over seeds: few numbers, so Student's t; nothing is claimed from one seed.

Sources: scipy's one-sample t test and its interval; S. Holm (1979), A simple sequentially rejective multiple test
procedure.

    paired(values - baseline)      # a row per column: n, mean, low, high, p, identical
"""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.95


def paired(differences: pd.DataFrame) -> pd.DataFrame:
    """A row for each column of (pairs, comparisons): n, mean, 95 % t interval, p against 0, and whether all are 0.

    NaN values do not count; `low`, `high` and `p` are NaN from fewer than two. Where all differences are one and the
    same there is no spread to test by: p is that of the sign test, and 1 where they are 0.
    """
    n, same = differences.count(), differences.max() == differences.min()
    out = pd.DataFrame({"n": n, "mean": differences.mean().where(~same, differences.max())}, dtype="float64")
    tested = n[n > 1].index
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns without spread
        test = stats.ttest_1samp(differences[tested].to_numpy(np.float64), 0.0, nan_policy="omit")
        limits = test.confidence_interval(LEVEL)
    found = pd.DataFrame({"low": limits.low, "high": limits.high, "p": test.pvalue}, index=tested)
    out = out.join(found).astype({"n": "int64"})
    flat = same & (n > 1)
    out.loc[flat, ["low", "high"]] = out.loc[flat, ["mean", "mean"]].to_numpy()
    out.loc[flat, "p"] = np.where(out.loc[flat, "mean"] == 0, 1.0, 2.0 ** (1.0 - n[flat]))
    return out.assign(identical=same & (out["mean"] == 0))


def equivalence(differences: pd.DataFrame, margin: float) -> pd.Series:
    """p of two one-sided t tests, for each column: small where the mean lies within ± `margin`. NaN from under two."""
    enough = differences.loc[:, differences.count() > 1]
    values = enough.to_numpy(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns without spread
        above = stats.ttest_1samp(values, -margin, nan_policy="omit", alternative="greater").pvalue
        below = stats.ttest_1samp(values, margin, nan_policy="omit", alternative="less").pvalue
    return pd.Series(np.maximum(above, below), index=enough.columns, dtype="float64").reindex(differences.columns)


def holm(p_values: Sequence[float] | np.ndarray | pd.Series) -> np.ndarray:
    """Holm's adjusted p values, in the order given; a NaN stays one and does not count as a test."""
    p = np.asarray(p_values, dtype=np.float64)
    out = np.full(len(p), math.nan)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    stepwise = np.minimum(1.0, (len(order) - np.arange(len(order))) * p[order])
    out[order] = np.maximum.accumulate(stepwise)
    return out
