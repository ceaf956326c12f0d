"""Intervals and corrections against plain Python, scipy's own tests, and the truth by simulation."""

import math
import statistics as plain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from overlaprl_ray.reports.statistics import holm, interval, paired, paired_columns

numbers = st.floats(-100, 100, allow_nan=False, width=32)
many = st.lists(numbers, min_size=2, max_size=12)


@settings(deadline=None)
@given(many)
def test_interval_is_students(values):
    found = interval(values)
    mean, n = plain.fmean(values), len(values)
    half = stats.t.ppf(0.975, n - 1) * plain.stdev(values) / math.sqrt(n)
    assert found.n == n
    assert found.mean == pytest.approx(mean, abs=1e-9)
    assert found.low == pytest.approx(mean - half, abs=1e-6)
    assert found.high == pytest.approx(mean + half, abs=1e-6)


def test_nothing_is_claimed_from_one_value_or_none():
    one, none = interval([0.5]), interval([])
    assert (one.mean, one.n) == (0.5, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert math.isnan(none.mean)
    assert none.n == 0
    only = paired([0.5], [0.25])
    assert (only.mean, only.n, only.identical) == (0.25, 1, False)
    assert math.isnan(only.low)
    assert math.isnan(only.p)


def test_missing_values_do_not_count():
    assert interval([1.0, math.nan, 2.0]) == interval([1.0, 2.0])
    found = paired([1.0, math.nan, 2.0, 4.0], [0.5, 0.0, math.nan, 3.0])
    assert (found.n, found.mean) == (2, 0.75)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12))
def test_paired_is_the_paired_t_test(pairs):
    values, baseline = np.array(pairs).T
    found = paired(values, baseline)
    differences = values - baseline
    assert found.mean == pytest.approx(plain.fmean(differences), abs=1e-9)
    if np.ptp(differences) < 1e-6 * max(1.0, np.abs(differences).max()):
        return  # scipy warns of lost precision there
    expected = stats.ttest_rel(values, baseline)
    low, high = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))


def test_identical_pairs_give_no_nan():
    found = paired([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (found.mean, found.low, found.high, found.p, found.n, found.identical) == (0.0, 0.0, 0.0, 1.0, 3, True)
    assert paired([0.1], [0.1]).identical


def test_equal_differences_are_tested_by_their_signs():
    found = paired([1.5, 2.5, 3.5], [1.0, 2.0, 3.0])
    assert (found.mean, found.low, found.high, found.identical) == (0.5, 0.5, 0.5, False)
    assert found.p == 0.25  # two of the eight sign patterns are as one-sided


@settings(deadline=None)
@given(st.lists(st.lists(st.one_of(numbers, st.just(math.nan)), min_size=6, max_size=6), min_size=1, max_size=5))
def test_many_comparisons_at_once_are_each_by_itself(columns):
    differences = np.array(columns).T
    found = paired_columns(differences)
    for index, column in enumerate(columns):
        alone = paired(column, [0.0] * len(column))
        for name in ("mean", "low", "high", "p", "n", "identical"):
            np.testing.assert_equal(found[name][index], getattr(alone, name))


def naive_holm(p):
    """The definition: the largest of (m - j) p over the tests at least as significant, at most 1."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    out = [0.0] * len(p)
    for place, index in enumerate(order):
        out[index] = min(1.0, max((len(p) - j) * p[order[j]] for j in range(place + 1)))
    return out


@settings(deadline=None)
@given(st.lists(st.floats(0, 1, allow_nan=False), max_size=12))
def test_holm(p):
    assert holm(p).tolist() == pytest.approx(naive_holm(p))


def test_holm_leaves_out_what_was_not_tested():
    found = holm([0.01, math.nan, 0.04])
    assert found[[0, 2]].tolist() == pytest.approx([0.02, 0.04])
    assert math.isnan(found[1])


def test_coverage_of_five_seeds():
    """95 % nominal: of 4,000 sweeps of 5 seeds with a known mean difference, 92 to 98 in 100 intervals hold it."""
    rng = np.random.default_rng(0)
    truth = 0.3
    differences = rng.normal(truth, 2.0, size=(5, 4000))
    found = paired_columns(differences)
    share = np.mean((found["low"] <= truth) & (truth <= found["high"]))
    assert 0.94 <= share <= 0.96  # within 92 to 98, as asked, and within simulation error of 95
    alone = [paired(differences[:, i], np.zeros(5)) for i in range(1000)]
    assert 0.92 <= np.mean([one.low <= truth <= one.high for one in alone]) <= 0.98


def test_familywise_error_of_holm():
    """With nothing to find, at most 5 in 100 families of six comparisons say that they found something."""
    rng = np.random.default_rng(1)
    found = paired_columns(rng.normal(0.0, 1.0, size=(5, 6 * 2000)))
    families = found["p"].reshape(2000, 6)
    share = np.mean([holm(family).min() < 0.05 for family in families])
    assert share < 0.065
    assert np.mean(families.min(axis=1) < 0.05) > 0.2  # without the correction it would be one in four
