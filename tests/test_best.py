"""The best values of one sweep, run by the next, against a plain recomputation on made-up areas."""

import json
import random
from statistics import fmean

import pytest
import yaml

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tune.best import keep_best
from overlaprl_ray.tune.plan import plan_trials
from overlaprl_ray.tune.spec import load_sweep

SEARCH = {"seed": {"grid": [100, 101]}, "pipeline.lag": {"grid": [0, 1, 4]}, "grpo.lr": {"grid": [1e-4, 2e-4, 4e-4]}}


@pytest.fixture
def tuned(tmp_path):
    """(sweep file, folder of the finished tuning sweep, {(lag, lr, seed): area})"""
    rng, areas = random.Random(0), {}
    file = tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump({"base": {"pipeline": {"mode": "async"}}, "search": SEARCH}))
    folder = tmp_path / "tuned"
    sweep = load_sweep(file)
    for trial in plan_trials(sweep, folder).trials:
        trial.folder.mkdir(parents=True)
        curve = [rng.random() for _ in range(3)]
        rows = [{"step": 0, "accuracy": 9.9}, *({"step": 20 * i + 20, "accuracy": a} for i, a in enumerate(curve))]
        (trial.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (trial.folder / "summary.json").write_text('{"status": "done"}')
        areas[trial.config.lag, trial.config.grpo.lr, trial.config.seed] = fmean(curve)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False))
    return file, folder, areas


def kept(file, folder, tmp_path, seeds=(1000, 1001, 1002), **overrides):
    sweep = load_sweep(file, {"tune.best_of": str(folder), **overrides}, seeds)
    return keep_best(plan_trials(sweep, tmp_path / "tested"), sweep, tmp_path / "tested")


def test_each_arm_runs_its_own_best_rate_on_the_new_seeds(tuned, tmp_path):
    file, folder, areas = tuned
    plan = kept(file, folder, tmp_path)
    for lag in (0, 1, 4):
        means = {lr: fmean(areas[lag, lr, seed] for seed in (100, 101)) for lr in (1e-4, 2e-4, 4e-4)}
        best = max(means, key=means.get)
        found = [trial.config for trial in plan.trials if trial.config.lag == lag]
        assert [(config.grpo.lr, config.seed) for config in found] == [(best, seed) for seed in (1000, 1001, 1002)]
        (note,) = [note for note in plan.notes if f"pipeline.lag={lag}" in note]
        assert f"best of 3: grpo.lr={best}, area {means[best]:.3f} over 2 seeds" in note
        assert ("at the edge" in note) == (best != 2e-4)
    assert len(plan.dropped) == 18


def test_several_settings_are_chosen_together(tuned, tmp_path):
    file, folder, areas = tuned
    plan = kept(file, folder, tmp_path, **{"tune.best_over": ["grpo.lr", "pipeline.lag"]})
    by_setting = {pair: fmean(areas[(*pair, seed)] for seed in (100, 101)) for pair in {key[:2] for key in areas}}
    assert {(t.config.lag, t.config.grpo.lr) for t in plan.trials} == {max(by_setting, key=by_setting.get)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pipeline.lag": {"grid": [2]}}, "no finished trial there has the settings of"),
        ({"grpo.lr": {"grid": [3e-4]}}, "not among this sweep's values; give both sweeps the same grid"),
        ({"tune.best_of": "nowhere"}, "holds no sweep; run that first"),
        ({"tune.best_over": ["grpo.rate"]}, "tune.best_over: unknown setting 'grpo.rate'"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(tuned, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        kept(*tuned[:2], tmp_path, **overrides)


def test_a_sweep_cannot_choose_from_itself(tuned):
    file, folder, _ = tuned
    sweep = load_sweep(file, {"tune.best_of": str(folder)}, [1000])
    with pytest.raises(ConfigError, match="the sweep's own folder"):
        keep_best(plan_trials(sweep, folder), sweep, folder)
