"""Budgets and targets against loops in plain Python, on random ragged tables."""

import itertools
import math
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaprl_ray.reports.budgets import common_budget, curves, to_target, values_at
from overlaprl_ray.reports.loading import Results

COLUMN = {"steps": "step", "tokens": "tokens", "seconds": "wall_s"}


def made(seed: int, trials: int = 4) -> Results:
    """Random trials of different lengths, rows shuffled, some losses missing."""
    rng = random.Random(seed)
    history, evals = [], []
    for number in range(trials):
        steps, tokens, wall = rng.randint(1, 30), 0, 0.0
        for step in range(1, steps + 1):
            tokens, wall = tokens + rng.randint(1, 9), wall + rng.uniform(0.01, 1)
            loss = None if rng.random() < 0.2 else rng.gauss(0, 1)
            history.append({"trial": f"t{number}", "step": step, "wall_s": wall, "tokens": tokens,
                            "reward": rng.random(), "loss": loss})  # fmt: skip
        marks = sorted({0, steps, *(rng.randint(0, steps) for _ in range(3))})
        evals += [{"trial": f"t{number}", "step": step, "accuracy": rng.random()} for step in marks]
    rng.shuffle(history)
    rng.shuffle(evals)
    names = [f"t{number}" for number in range(trials)]
    rng.shuffle(names)
    about = pd.DataFrame({"trial": names, "status": "done", "mode": "sync", "lag": 0, "rule": "none", "seed": 0})
    return Results(about, pd.DataFrame(history), pd.DataFrame(evals), pd.DataFrame(columns=["trial"]), [])


def naive_curve(results: Results, trial: str, metric: str, budget: str) -> list[tuple[float, float]]:
    """(spent, value) points by the definition."""
    rows = sorted((r for r in results.history.to_dict("records") if r["trial"] == trial), key=lambda r: r["step"])
    if metric == "accuracy":
        spent = {0: 0.0, **{row["step"]: float(row[COLUMN[budget]]) for row in rows}}
        evals = sorted((r for r in results.evals.to_dict("records") if r["trial"] == trial), key=lambda r: r["step"])
        return [(spent[e["step"]], e["accuracy"]) for e in evals]
    out = []
    for index, row in enumerate(rows):
        known = [r[metric] for r in rows[max(0, index - 9) : index + 1] if not math.isnan(r[metric])]
        if known:
            out.append((float(row[COLUMN[budget]]), sum(known) / len(known)))
    return out


def naive_value(curve: list[tuple[float, float]], at: float) -> float:
    """Straight lines between points; the first value before the first point, none after the last."""
    if at > curve[-1][0]:
        return math.nan
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= at <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return math.nan


cases = given(st.integers(0, 10**6), st.sampled_from(["reward", "loss", "accuracy"]), st.sampled_from(list(COLUMN)))


@settings(max_examples=40, deadline=None)
@cases
def test_curves_and_values(seed, metric, budget):
    results = made(seed)
    found = curves(results, metric, budget)
    expected = {t: naive_curve(results, t, metric, budget) for t in results.trials["trial"]}
    expected = {trial: curve for trial, curve in expected.items() if curve}
    assert set(found) == set(expected)
    for trial, curve in expected.items():
        assert found[trial][0].tolist() == pytest.approx([x for x, _ in curve])
        assert found[trial][1].tolist() == pytest.approx([y for _, y in curve])
    least = min(curve[-1][0] for curve in expected.values())
    assert common_budget(found) == pytest.approx(least)
    for at in (None, 0.0, least / 2, least * 1.5):
        values = values_at(results, metric, budget, at)
        assert list(values.index) == list(results.trials["trial"])
        for trial, curve in expected.items():
            np.testing.assert_allclose(values[trial], naive_value(curve, least if at is None else at), rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["reward", "accuracy"]), st.floats(0.3, 0.9))
def test_to_target(seed, metric, target):
    results = made(seed)
    found = to_target(results, target, metric)
    for trial in results.trials["trial"]:
        for budget in COLUMN:
            curve = naive_curve(results, trial, metric, budget)[9 if metric == "reward" else 0 :]
            hits = [x for x, y in curve if y >= target]
            np.testing.assert_allclose(found.loc[trial, budget], hits[0] if hits else math.nan)


def test_unknown_names_are_said():
    with pytest.raises(ValueError, match="metric = 'rewards'"):
        curves(made(0), "rewards")
    with pytest.raises(ValueError, match="budget = 'hours'"):
        curves(made(0), "reward", "hours")
