"""The study: outcomes and tests against plain Python and scipy; committed runs are repeated."""

import random
import statistics as plain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import small
from scipy import stats
from study import write_run, write_sweep

from overlaprl_ray.config.identity import ALGORITHM, config_hash
from overlaprl_ray.reports.comparison import by_seed
from overlaprl_ray.reports.figures import NOTE
from overlaprl_ray.reports.loading import KEPT, load, load_or_explain, save
from overlaprl_ray.reports.statistics import equivalence, holm
from overlaprl_ray.reports.study import config_of, contrasts, outcomes
from overlaprl_ray.reports.study_figures import best_rate, outcome_map, rules_at_rates

COMMITTED = Path(__file__).parent.parent / "analysis" / "results"
RATES, LAGS = (1e-4, 2e-4, 4e-4), (0, 1, 4)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three lags × three rates × three seeds."""
    settings = [{"pipeline__mode": "async", "pipeline__lag": lag, "grpo__lr": lr} for lag in LAGS for lr in RATES]
    return write_sweep(tmp_path_factory.mktemp("study") / "e1", random.Random(0), settings, seeds=3)


def test_the_area_is_the_mean_accuracy_after_step_0(sweep):
    results = load(sweep)
    for row in outcomes(results).to_dict("records"):
        evals = results.evals[results.evals["trial"] == row["trial"]].to_dict("records")
        assert row["area"] == pytest.approx(plain.fmean(e["accuracy"] for e in evals if e["step"]))
        assert (row["fired"], row["discarded"]) == pytest.approx(
            ((row["decisions.stale"] + row["decisions.discard"]) / 24, row["decisions.discard"] / 24)
        )


def test_contrasts_are_scipys_tests():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"a": rng.normal(0.5, 0.1, 8), "c": rng.normal(1.5, 0.1, 8)})
    table["b"] = table["a"] + [0.01, -0.02, 0.02, -0.01, 0.01, -0.01, 0.02, -0.02]
    table.loc[0, "b"] = np.nan  # a seed that one arm lacks
    pairs = [("b", "a"), ("c", "a"), ("a", "c"), ("c", "b")]
    found = contrasts(table, pairs, margin=0.05, primary=("c", "a"))
    expected = []
    for row, (arm, other) in zip(found.to_dict("records"), pairs, strict=True):
        both = table[[arm, other]].dropna()
        test = stats.ttest_rel(both[arm], both[other])
        sides = [stats.ttest_1samp(both[arm] - both[other], limit, alternative=side).pvalue
                 for limit, side in ((-0.05, "greater"), (0.05, "less"))]  # fmt: skip
        low, high = test.confidence_interval(0.95)
        assert (row["setting"], row["held_to"], row["n"]) == (arm, other, len(both))
        assert [row["low"], row["high"], row["p"]] == pytest.approx([low, high, test.pvalue])
        assert row["p_equivalent"] == pytest.approx(max(sides))
        expected.append(test.pvalue)
    assert found["p_holm"].iloc[1] == pytest.approx(expected[1])  # the primary one stands by itself
    assert found["p_holm"][[0, 2, 3]].tolist() == pytest.approx(holm([expected[i] for i in (0, 2, 3)]).tolist())
    assert list(found["verdict"]) == ["equivalent", "higher", "lower", "higher"]


def test_equivalence_has_its_level():
    """Where the truth lies on the margin, at most 5 in 100 of 4,000 sweeps of five seeds call it equal."""
    gaps = pd.DataFrame(np.random.default_rng(0).normal(0.05, 0.03, size=(5, 4000)))
    assert 0.03 < (equivalence(gaps, 0.05) < 0.05).mean() < 0.06
    assert equivalence(gaps.head(1), 0.05).isna().all()


def test_compact_tables_hold_what_a_row_must_say(tmp_path):
    """The configuration comes back whole, null settings and lists too."""
    given = {"seed": 3, "grpo__clip_eps": None, "task__rewards": ["dense_reward:digits"], "pipeline__lag": 2}
    run = write_run(tmp_path / "run", random.Random(0), **given)
    (run / "environment.json").write_text('{"algorithm": 2, "cpu": "one", "versions": {"torch": "2.13"}}')
    results = load(run)
    save(results, tmp_path / "tables", compact=True)
    again = load(tmp_path / "tables")
    config = config_of(again.trials.iloc[0])
    assert (config.seed, config.grpo.clip_eps, config.task.rewards, config.lag) == (3, None, ["dense_reward:digits"], 2)
    assert config_hash(config) == config_hash(config_of(results.trials.iloc[0]))
    about = again.trials.iloc[0][["environment.algorithm", "environment.cpu", "environment.torch"]]
    assert about.to_list() == [2, "one", "2.13"]
    assert {*again.history} <= KEPT
    pd.testing.assert_frame_equal(again.history, results.history[list(again.history)], check_categorical=False)


# ---- figures ----


def test_best_rate_is_the_seeds_geometric_mean(sweep):
    results = load(sweep)
    trials = outcomes(results)
    axes = best_rate(results).axes[0]
    for x, y in axes.lines[0].get_xydata():
        part = trials[trials["lag"] == x - 1]
        rates = [rows.loc[rows["area"].idxmax(), "grpo.lr"] for _, rows in part.groupby("seed")]
        assert y == pytest.approx(plain.geometric_mean(rates))
    assert "n 3" in axes.figure.legends[0].get_texts()[0].get_text()


def test_outcome_map_holds_means_and_intervals(sweep):
    results = load(sweep)
    (axes,) = outcome_map(results, "grpo.lr", "pipeline.lag").axes
    areas = outcomes(results).groupby(["pipeline.lag", "grpo.lr"])["area"]
    np.testing.assert_allclose(axes.images[0].get_array(), areas.mean().unstack())
    half = stats.t.ppf(0.975, 2) * areas.std() / 3**0.5
    texts = [f"{m:.3f}\n± {h:.3f}" for m, h in zip(areas.mean(), half, strict=True)]
    assert [text.get_text() for text in axes.texts] == texts
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "lag, versions")


def test_thresholds_have_a_map_for_each_rate(tmp_path):
    settings = [{"staleness__kl_fresh": f, "staleness__kl_stale": s, "grpo__lr": lr, "pipeline__lag": 4}
                for f, s in ((0.01, 0.1), (0.01, 0.3), (0.1, 0.3)) for lr in RATES[:2]]  # fmt: skip
    figure = outcome_map(load(write_sweep(tmp_path, random.Random(0), settings, 2)),
                         "staleness.kl_fresh", "staleness.kl_stale")  # fmt: skip
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == ["lr 0.0001", "lr 0.0002"]
    assert all(axes.images[0].get_array().mask.sum() == 1 for axes in figure.axes)  # the pair that was not run


def test_rules_at_their_own_rate_and_at_one(sweep):
    results = load(sweep)
    axes = rules_at_rates(results, RATES[0]).axes[0]
    table = by_seed(results, outcomes(results).set_index("trial")["area"]).mean()
    best = [table[[f"lr {lr:g}, lag {lag}" for lr in RATES]].max() for lag in LAGS]
    fixed = [table[f"lr 0.0001, lag {lag}"] for lag in LAGS]
    own, at = (container.lines[0].get_xdata() for container in axes.containers)
    assert (own.tolist(), at.tolist()) == (pytest.approx(best), pytest.approx(fixed))


@pytest.mark.parametrize(
    "draw", [best_rate, lambda r: outcome_map(r, "grpo.lr", "pipeline.lag"), lambda r: rules_at_rates(r, 1e-4)]
)
def test_nothing_to_draw_is_said(draw, tmp_path):
    assert draw(load_or_explain(tmp_path)).get_label() == NOTE


# ---- committed blocks ----


def serial_blocks() -> list[str]:
    """Committed tables of this algorithm whose runs need nothing but the built-in model."""
    found = []
    for path in sorted(COMMITTED.glob("*/trials.parquet")):
        trials = pd.read_parquet(path)
        known = trials.get("environment.algorithm", pd.Series(dtype=float)) == ALGORITHM
        if known.any() and (trials["grpo.model_name"] == small().grpo.model_name).all():
            found.append(path.parent.name)
    return found


class Enough(Exception):
    """Three steps are done."""


@pytest.mark.slow
@pytest.mark.parametrize("block", serial_blocks())
def test_a_committed_run_can_be_repeated(block):
    """Its first three steps: bit for bit on the CPU type and torch that made it, else within 1e-3 at step 1."""
    from overlaprl_ray.runs.environment import environment
    from overlaprl_ray.runtime.replay import replay

    results = load(COMMITTED / block).done
    trial = results.trials.iloc[0]
    config = config_of(trial)
    assert config_hash(config) == trial["trial"].rstrip("+")
    rows = []

    def keep(result):
        rows.append(result.metrics)
        if len(rows) == 3:
            raise Enough

    with pytest.raises(Enough):
        replay(config, keep)
    here = environment()
    same = [here["cpu"], here["versions"]["torch"]] == [trial["environment.cpu"], trial["environment.torch"]]
    stored = results.history[results.history["trial"] == trial["trial"]].sort_values("step").to_dict("records")
    for row, old in zip(rows if same else rows[:1], stored, strict=False):
        names = [name for name in old if name in row and name != "tokens"]  # a file adds them up
        assert {"step", "reward", "loss"} <= {*names}
        expected = [np.nan if old[name] is None else old[name] for name in names]
        found = [np.nan if row[name] is None else row[name] for name in names]
        np.testing.assert_allclose(found, expected, rtol=0, atol=0 if same else 1e-3)
