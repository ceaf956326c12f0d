"""Comparisons of settings against loops in plain Python, on random studies in real folders."""

import itertools
import math
import random
import statistics as plain

import pytest
from scipy import stats
from study import modes, write_run, write_sweep

from overlaprl_ray.config.grpo import TINY_DEFAULTS
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.reports.comparison import (
    best_plain,
    compare,
    compare_budgets,
    compare_sweeps,
    default_baseline,
    find_setting,
    ranking,
    throughout,
)
from overlaprl_ray.reports.loading import load
from overlaprl_ray.reports.statistics import holm
from overlaprl_ray.reports.trials import labels


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Four modes, two lags, four seeds."""
    return write_sweep(tmp_path_factory.mktemp("modes"), random.Random(0), modes(1, 4), seeds=4)


@pytest.fixture(scope="module")
def results(sweep):
    return load(sweep)


def finals(results, column="reward_last_10"):
    """{label: {seed: value}} of finished runs, by a plain loop."""
    out = {}
    for row, label in zip(results.trials.to_dict("records"), labels(results.trials), strict=True):
        if row["status"] == "done":
            out.setdefault(label, {})[row["seed"]] = row[column]
    return out


@pytest.mark.parametrize(("metric", "column"), [("reward", "reward_last_10"), ("accuracy", "accuracy_final")])
def test_compare_at_the_last_step(results, metric, column):
    found = compare(results, {"mode": "sync"}, metric)
    values = finals(results, column)
    assert found.attrs["at"] == 24
    assert list(found["setting"]) == [name for name in values if name != "mode sync"]
    for row in found.to_dict("records"):
        differences = [values[row["setting"]][seed] - values["mode sync"][seed] for seed in range(4)]
        expected = stats.ttest_1samp(differences, 0.0)
        low, high = expected.confidence_interval(0.95)
        assert row["n"] == 4
        assert row["value"] == pytest.approx(plain.fmean(values[row["setting"]].values()))
        assert row["baseline"] == pytest.approx(plain.fmean(values["mode sync"].values()))
        assert row["difference"] == pytest.approx(plain.fmean(differences))
        assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))
        assert row["p"] == pytest.approx(expected.pvalue)


def test_compare_at_equal_seconds_takes_each_run_at_that_second(results):
    found = compare(results, "mode sync", "reward", "seconds", at=3.0)
    history = results.history.sort_values("step")
    row = found.iloc[0]
    trials = results.trials[labels(results.trials) == row["setting"]]
    values = []
    for trial in trials["trial"]:
        rows = history[history["trial"] == trial]
        means = [plain.fmean(rows["reward"].to_list()[max(0, i - 9) : i + 1]) for i in range(len(rows))]
        times = rows["wall_s"].to_list()
        after = next(i for i, t in enumerate(times) if t >= 3.0)
        share = (3.0 - times[after - 1]) / (times[after] - times[after - 1])
        values.append(means[after - 1] + share * (means[after] - means[after - 1]))
    assert row["value"] == pytest.approx(plain.fmean(values))


def test_holm_and_verdicts_hang_together(results):
    found = compare(results, "mode sync")
    assert (found["p_holm"] >= found["p"]).all()
    for row in found.to_dict("records"):
        if row["p_holm"] < 0.05:
            assert row["verdict"] == ("higher" if row["difference"] > 0 else "lower")
        else:
            assert row["verdict"] == "cannot be told apart"


def test_ranking_and_pairs(results):
    values = finals(results)
    order = sorted(values, key=lambda name: -plain.fmean(values[name].values()))
    found = ranking(results)
    assert list(found["setting"]) == order
    assert list(found["rank"]) == [1, 2, 3, 4, 5, 6, 7]
    pairs = list(itertools.combinations(values, 2))
    p = holm([stats.ttest_rel(list(values[a].values()), list(values[b].values())).pvalue for a, b in pairs])
    told = {frozenset(pair) for pair, p in zip(pairs, p, strict=True) if p < 0.05}
    for row in found.to_dict("records"):
        near = [int(place) for place in row["cannot_be_told_apart_from"].split(", ") if place]
        for place, other in enumerate(order, start=1):
            if other != row["setting"]:
                assert (place in near) == (frozenset((row["setting"], other)) not in told)


def test_identical_settings_are_called_so(tmp_path):
    for seed in range(3):
        for mode in ("staleness", "overlap"):  # the same random numbers: the same run
            write_run(tmp_path / f"{mode}{seed}", random.Random(seed), seed=seed, pipeline__mode=mode)
        write_run(tmp_path / f"sync{seed}", random.Random(10 + seed), seed=seed, pipeline__mode="sync")
    results = load(tmp_path)
    row = compare(results, {"mode": "staleness"}).set_index("setting").loc["mode overlap"]
    assert (row["verdict"], row["difference"], row["low"], row["high"], row["p"]) == ("identical", 0.0, 0.0, 0.0, 1.0)
    assert not compare(results, {"mode": "staleness"}).isna().any(axis=None)
    found = ranking(results).set_index("setting")
    assert found.loc["mode overlap", "identical_to"] == str(found.loc["mode staleness", "rank"])


def test_one_seed_has_no_interval(tmp_path):
    write_sweep(tmp_path, random.Random(0), modes(1), seeds=1)
    results = load(tmp_path)
    found = compare(results, {"mode": "sync"})
    assert set(found["verdict"]) == {"one pair: no interval"}
    assert found[["low", "high", "p", "p_holm"]].isna().all(axis=None)
    assert ranking(results)[["low", "high"]].isna().all(axis=None)


def test_seeds_that_do_not_meet_are_not_compared(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", random.Random(seed), seed=seed, pipeline__mode="sync")
        write_run(tmp_path / f"b{seed}", random.Random(seed), seed=seed + 10, pipeline__mode="async")
    results = load(tmp_path)
    found = compare(results, {"mode": "sync"}).iloc[0]
    assert (found["n"], found["verdict"]) == (0, "no common seed")
    assert math.isnan(found["difference"])


def test_only_finished_runs_count(tmp_path):
    write_sweep(tmp_path, random.Random(0), modes(1), seeds=3)
    write_run(tmp_path / "trials" / "broken", random.Random(9), steps=3, status="failed", seed=7, pipeline__mode="sync")
    write_run(tmp_path / "trials" / "going", random.Random(8), steps=2, status=None, seed=8, pipeline__mode="sync")
    found = compare(load(tmp_path), {"mode": "sync"})
    assert list(found["n"]) == [3, 3, 3]
    assert found.attrs["at"] == 24  # not the 2 steps of the run that goes on


def test_repeats_of_a_seed_are_averaged(tmp_path):
    for copy in range(2):
        for seed in range(2):
            for mode in ("sync", "async"):
                rng = random.Random(f"{copy}{seed}{mode}")
                write_run(tmp_path / f"{mode}{seed}{copy}", rng, seed=seed, pipeline__mode=mode)
    results = load(tmp_path)
    found = compare(results, {"mode": "sync"}).iloc[0]
    rewards = {}
    for row in results.trials.to_dict("records"):
        rewards.setdefault((row["mode"], row["seed"]), []).append(row["reward_last_10"])
    differences = [plain.fmean(rewards["async", s]) - plain.fmean(rewards["sync", s]) for s in (0, 1)]
    assert (found["n"], found["difference"]) == (2, pytest.approx(plain.fmean(differences)))


def test_baselines(results):
    assert default_baseline(results) == "mode sync"
    assert find_setting(results, {"mode": "async", "lag": 4}) == "mode async, lag 4"
    assert find_setting(results, {"pipeline.mode": "async", "pipeline.lag": "4"}) == "mode async, lag 4"
    with pytest.raises(ConfigError, match="2 settings are that; name one of: mode async, lag 1; mode async, lag 4"):
        find_setting(results, {"mode": "async"})
    with pytest.raises(ConfigError, match=r"no such setting; settings: mode sync"):
        find_setting(results, {"speed": 3})
    with pytest.raises(ConfigError, match="no setting is that"):
        compare(results, "mode turbo")


def test_best_plain_is_the_best_without_a_rule(results):
    values = {
        name: found for name, found in finals(results).items() if "staleness" not in name and "overlap" not in name
    }
    assert best_plain(results) == max(values, key=lambda name: plain.fmean(values[name].values()))


def test_budgets_stand_under_one_another(results):
    found = compare_budgets(results, "mode sync", "accuracy")
    assert list(found["budget"].drop_duplicates()) == ["steps", "tokens", "seconds"]
    assert len(found) == 3 * 6
    assert list(compare_budgets(results, "mode sync", clock=False)["budget"].drop_duplicates()) == ["steps", "tokens"]
    assert compare_budgets(results, None).empty


def test_two_sweeps_setting_by_setting(results, sweep, tmp_path):
    faster = [{**values, "grpo__lr": 0.002} for values in modes(1)]
    second = load(write_sweep(tmp_path / "second", random.Random(5), faster, seeds=3))
    found = compare_sweeps(results, second)
    assert list(found["setting"]) == ["mode sync", "mode async, lag 1", "mode staleness, lag 1", "mode overlap, lag 1"]
    assert list(found["n"]) == [3] * 4
    first, other = finals(results), finals(second)
    differences = [other["mode sync"][seed] - first["mode sync"][seed] for seed in range(3)]
    assert found["difference"].iloc[0] == pytest.approx(plain.fmean(differences))
    assert throughout(results, second) == {"grpo.lr": (str(TINY_DEFAULTS["lr"]), "0.002")}
    same = compare_sweeps(results, load(sweep), "accuracy")
    assert set(same["verdict"]) == {"identical"}
    assert throughout(results, results) == {}
