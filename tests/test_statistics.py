"""Intervals and corrections against scipy's own tests, plain Python, and the truth by simulation."""

import math
import statistics as plain

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from overlaprl_ray.reports.statistics import holm, paired

numbers = st.floats(-100, 100, allow_nan=False, width=32)
gaps = st.lists(st.lists(numbers | st.just(math.nan), min_size=5, max_size=5), min_size=1, max_size=4)


@settings(deadline=None)
@given(gaps)
def test_paired_is_the_paired_t_test_of_each_column(columns):
    found = paired(pd.DataFrame(np.array(columns).T))
    for row, column in zip(found.to_dict("records"), columns, strict=True):
        values = [v for v in column if not math.isnan(v)]
        assert row["n"] == len(values)
        np.testing.assert_allclose(row["mean"], plain.fmean(values) if values else math.nan, atol=1e-9)
        if len(values) < 2:  # nothing is claimed from one value
            assert all(math.isnan(row[name]) for name in ("low", "high", "p"))
        elif np.ptp(values) > 1e-6 * max(1.0, np.abs(values).max()):  # scipy warns of lost precision below
            expected = stats.ttest_rel(values, [0.0] * len(values))
            low, high = expected.confidence_interval(0.95)
            half = stats.t.ppf(0.975, len(values) - 1) * plain.stdev(values) / math.sqrt(len(values))
            assert row["p"] == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
            assert (row["low"], row["high"]) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))
            assert high - low == pytest.approx(2 * half)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5], (1, 0.5, math.nan, math.nan, False)),
        ([0.0], (1, 0.0, math.nan, math.nan, True)),
        ([0.0, 0.0, 0.0], (3, 0.0, 0.0, 1.0, True)),
        ([0.5, 0.5, 0.5], (3, 0.5, 0.5, 0.25, False)),  # two of the eight sign patterns are as one-sided
        ([0.1, math.nan, 0.1], (2, 0.1, 0.1, 0.5, False)),
        ([math.nan], (0, math.nan, math.nan, math.nan, False)),
    ],
)
def test_columns_without_spread_give_no_nonsense(values, expected):
    row = paired(pd.DataFrame({"a": values})).loc["a"]
    np.testing.assert_equal((row["n"], row["mean"], row["low"], row["p"], row["identical"]), expected)
    np.testing.assert_equal(row["high"], row["low"])


def test_nothing_gives_nothing():
    assert paired(pd.DataFrame()).empty
    assert paired(pd.DataFrame(columns=["a"], dtype=float)).loc["a", "n"] == 0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1, allow_nan=False), max_size=12))
def test_holm(p):
    """The definition: the largest of (m - j) p over the tests at least as significant, at most 1."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    expected = [0.0] * len(p)
    for place, index in enumerate(order):
        expected[index] = min(1.0, max((len(p) - j) * p[order[j]] for j in range(place + 1)))
    assert holm(p).tolist() == pytest.approx(expected)


def test_holm_leaves_out_what_was_not_tested():
    np.testing.assert_allclose(holm([0.01, math.nan, 0.04]), [0.02, math.nan, 0.04])


def test_coverage_of_five_seeds_and_familywise_error():
    """95 % nominal, of 4,000 sweeps of 5 seeds; and with nothing to find at most 5 in 100 families of six find it."""
    found = paired(pd.DataFrame(np.random.default_rng(0).normal(0.3, 2.0, size=(5, 4000))))
    assert 0.92 < ((found["low"] <= 0.3) & (found["high"] >= 0.3)).mean() < 0.98
    p = paired(pd.DataFrame(np.random.default_rng(1).normal(size=(5, 6 * 2000))))["p"].to_numpy().reshape(2000, 6)
    assert np.mean([holm(family).min() < 0.05 for family in p]) < 0.065
    assert np.mean(p.min(axis=1) < 0.05) > 0.2  # without the correction it would be one in four
