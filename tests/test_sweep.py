"""Sweep files: what they expand to, what is dropped, how a mistake is reported. No Ray is started."""

import itertools
import math
import re
from pathlib import Path

import pytest
import yaml

from overlaprl_ray import ConfigError
from overlaprl_ray.config.grpo import TINY_DEFAULTS
from overlaprl_ray.config.identity import config_hash
from overlaprl_ray.tune.cli import parse_sweep_command
from overlaprl_ray.tune.plan import plan_trials
from overlaprl_ray.tune.search_space import parse_domain, tune_domain
from overlaprl_ray.tune.spec import load_sweep

SHIPPED = sorted((Path(__file__).parent.parent / "tune_configs").glob("*.yaml"))
LADDER = {"staleness.kl_fresh": {"grid": [0.01, 0.1, 0.3]}, "staleness.kl_stale": {"grid": [0.1, 1.0]}}


def write(folder: Path, **parts) -> Path:
    path = folder / "sweep-x.yaml"
    path.write_text(yaml.safe_dump(parts, sort_keys=False), encoding="utf-8")
    return path


def plan(folder: Path, overrides=None, seeds=None, **parts):
    return plan_trials(load_sweep(write(folder, **parts), overrides, seeds), folder)


def settings(found) -> list[dict]:
    return [trial.point.settings for trial in found.trials]


# ---- expanding ----


def test_a_grid_is_every_combination_with_the_seed_slowest(tmp_path):
    found = plan(tmp_path, search={"grpo.lr": {"grid": [1e-4, 1e-3]}, "seed": {"grid": [3, 4]}, **LADDER})
    wanted = [
        {"grpo.lr": lr, "seed": seed, "staleness.kl_fresh": fresh, "staleness.kl_stale": stale}
        for seed, lr, fresh, stale in itertools.product([3, 4], [1e-4, 1e-3], [0.01, 0.1, 0.3], [0.1, 1.0])
        if fresh < stale
    ]
    assert settings(found) == wanted
    assert len(found.dropped) == 24 - len(wanted) == 8
    assert {reason.partition(";")[0] for _, reason in found.dropped} == {
        f"staleness.kl_fresh={fresh} must be below kl_stale=0.1" for fresh in (0.1, 0.3)
    }
    (line,) = [line for line in found.dropped_lines() if "kl_stale=0.1; " in line and "kl_fresh=0.3 must" in line]
    assert line.startswith("dropped 4 (grpo.lr=0.0001, seed=3, staleness.kl_fresh=0.3, staleness.kl_stale=0.1, ...): ")
    trial = found.trials[5]
    assert trial.config.staleness.kl_fresh == trial.point.settings["staleness.kl_fresh"]
    assert trial.config.grpo.num_steps == 250  # the built-in default, as without a sweep
    assert trial.name == config_hash(trial.config)
    assert trial.folder == tmp_path / "trials" / trial.name


def test_cases_are_bundles_with_grids_of_their_own(tmp_path):
    cases = [
        {"name": "plain", "staleness.rule": "none", "pipeline.lag": {"grid": [0, 8]}},
        {"name": "kl", "staleness.rule": "kl", "pipeline.lag": 8},
    ]
    found = plan(tmp_path, search={"cases": cases, "seed": {"grid": [0, 1]}})
    assert [(trial.point.case, trial.config.lag, trial.config.rule, trial.config.seed) for trial in found.trials] == [
        ("plain", 0, "none", 0), ("plain", 8, "none", 0), ("kl", 8, "kl", 0),
        ("plain", 0, "none", 1), ("plain", 8, "none", 1), ("kl", 8, "kl", 1),
    ]  # fmt: skip


def test_draws_are_paired_over_the_grid_and_more_samples_only_add(tmp_path):
    search = {"grpo.lr": {"loguniform": [1e-5, 1e-2]}, "pipeline.lag": {"randint": [0, 3]}, "seed": {"grid": [0, 1]},
              "grpo.clip_eps": {"uniform": [0.1, 0.3]}, "grpo.num_minibatches": {"choice": [1, 2, 4]}}  # fmt: skip
    few = plan(tmp_path, search=search, tune={"samples": 20})
    many = plan(tmp_path, search=search, tune={"samples": 40})
    other = plan(tmp_path, search=search, tune={"samples": 20, "sample_seed": 1})
    assert len(few.trials) == 40
    assert {trial.name for trial in few.trials} < {trial.name for trial in many.trials}
    assert not {trial.name for trial in few.trials} & {trial.name for trial in other.trials}
    by_seed = [[{**s, "seed": 0} for s in settings(few) if s["seed"] == seed] for seed in (0, 1)]
    assert by_seed[0] == by_seed[1]
    lrs = [s["grpo.lr"] for s in settings(many)]
    assert all(1e-5 <= lr < 1e-2 for lr in lrs)
    assert 8 < sum(lr < 10**-3.5 for lr in lrs) / 2 < 32  # half of them, on a logarithmic scale
    assert {s["pipeline.lag"] for s in settings(many)} == {0, 1, 2}
    assert {s["grpo.num_minibatches"] for s in settings(many)} == {1, 2, 4}
    assert all(0.1 <= s["grpo.clip_eps"] < 0.3 for s in settings(many))


def test_equal_trials_are_run_once_and_more_seeds_keep_the_old_names(tmp_path):
    parts = {"search": {"task.reward_timeout_s": {"grid": [30, 60]}, "seed": {"grid": [0]}}}  # no number depends on it
    found = plan(tmp_path, **parts)
    assert len(found.trials) == 1
    assert found.dropped[0][1] == "the same run as task.reward_timeout_s=30, seed=0"
    more = plan(tmp_path, seeds=[0, 1, 2], **parts)
    assert more.trials[0].name == found.trials[0].name
    assert len({trial.name for trial in more.trials}) == 3


def test_the_command_line_fixes_what_the_file_varies_or_varies_what_it_fixes(tmp_path):
    path = write(tmp_path, base={"grpo": {"num_steps": 9}}, search={"pipeline.lag": {"grid": [1, 2]}, **LADDER})
    sweep, folder, dry = parse_sweep_command(
        [str(path), "--pipeline.lag", "4", "--set", "grpo.lr={grid: [1e-4, 1e-3]}", "--staleness.kl_stale=1.0",
         "--grpo.num_steps", "3", "--seeds", "5", "6", "--tune.max_failures", "2", "--serial", "--dry-run"]
    )  # fmt: skip
    assert (folder, dry) == (Path("runs/sweep-x").absolute(), True)
    assert (sweep.tune.max_failures, sweep.tune.serial) == (2, True)
    trials = plan_trials(sweep, folder).trials
    assert len(trials) == 2 * 3 * 2
    assert {(t.config.lag, t.config.grpo.num_steps, t.config.staleness.kl_stale) for t in trials} == {(4, 3, 1.0)}
    assert {t.config.grpo.lr for t in trials} == {1e-4, 1e-3}
    assert {t.config.seed for t in trials} == {5, 6}


def test_base_can_be_a_file_beside_the_sweep(tmp_path):
    (tmp_path / "base.yaml").write_text("grpo: {num_steps: 7}", encoding="utf-8")
    found = plan(tmp_path, base="base.yaml")
    assert len(found.trials) == 1
    assert found.trials[0].config.grpo.num_steps == 7


@pytest.mark.parametrize(
    ("domain", "mean"),
    [({"loguniform": ["1e-6", 1e-2]}, -4), ({"uniform": [0.001, 0.1]}, -1.41), ({"choice": [1e-3, 1e-1]}, -2)],
)
def test_domains_are_those_of_tune(domain, mean):
    """Drawn within their bounds, with the mean logarithm of their distribution; YAML's own 1e-6 is a string."""
    drawn = tune_domain(parse_domain("grpo.lr", domain, "search")).sample(size=400, random_state=0)
    low, high = (float(bound) for bound in next(iter(domain.values())))
    assert all(low <= value <= high for value in drawn)
    assert sum(map(math.log10, drawn)) / 400 == pytest.approx(mean, abs=0.15)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"serach": {}}, r"serach: unknown setting .*did you mean 'search'"),
        ({"base": {"grpo": {"lrr": 1}}}, r"base: grpo.lrr: unknown setting .*did you mean 'grpo.lr'"),
        ({"base": {"output": {"dir": "x"}}}, r"base.output.dir = 'x': each trial gets its own; give --dir"),
        ({"base": "none.yaml"}, r"none.yaml': No such file"),
        ({"search": {"grpo.lr": 1e-3}}, r"search.grpo.lr = 0.001: give \{grid: \[a, b\]\}, .*belongs in base"),
        ({"search": {"grpo.lr": {"gird": [1e-3]}}}, r"search.grpo.lr: unknown key 'gird'; did you mean 'grid'"),
        ({"search": {"grpo.lr": {"grid": []}}}, r"search.grpo.lr.grid = \[\]: give a list with at least one value"),
        ({"search": {"grpo.lr": {"grid": [1e-3, -1]}}}, r"grpo.lr.grid = -1: input should be greater than 0; expected"),
        ({"search": {"grpo.lr": {"uniform": [0.2, 0.1]}}},
         r"uniform = \[0.2, 0.1\]: give two numbers, the lower first"),
        ({"search": {"grpo.lr": {"loguniform": [0, 0.1]}}}, r"give two numbers above 0, the lower first"),
        ({"search": {"grpo.lr": {"uniform": [0.5, 1.5]}}}, r"uniform = 1.5: input should be less than or equal to 1"),
        ({"search": {"pipeline.lag": {"randint": [0.5, 2]}}}, r"give two whole numbers, the lower first"),
        ({"search": {"pipeline.mod": {"grid": ["sync"]}}},
         r"unknown setting 'pipeline.mod'; did you mean 'pipeline.mode'"),
        ({"search": {"output.dir": {"grid": ["a"]}}}, r"search.output.dir: says where a run writes"),
        ({"search": {"cases": {"a": 1}}}, r"search.cases = .*give a list of mappings"),
        ({"search": {"cases": [{"seed": 1}]}}, r"search.cases\[1\].name = None: give every case a name"),
        ({"search": {"cases": [{"name": "a", "sed": 1}]}},
         r"search.cases\[1\]: unknown setting 'sed'; did you mean 'seed'"),
        ({"search": {"cases": [{"name": "a", "seed": 1}], "seed": {"grid": [0]}}},
         r"search.cases\[1\].seed: is given in search too"),
        ({"tune": {"max_concurent": 2}}, r"tune.max_concurent: unknown setting .*did you mean 'tune.max_concurrent'"),
        ({"tune": {"samples": 2}}, r"tune.samples = 2: nothing in search is random"),
        ({"tune": {"stop": {"rewart": 0.9}}}, r"unknown metric 'rewart'; did you mean 'reward'"),
        ({"tune": {"metric": "eval/acuracy"}}, r"unknown metric 'eval/acuracy'; did you mean 'eval/accuracy'"),
        ({"tune": {"fail_fast": True, "max_failures": 1}}, r"fail_fast = true cannot be combined with tune.max"),
        ({"tune": {"search_algorithm": "optuna"}}, r"optuna: search is empty"),
        ({"tune": {"scheduler": "asha", "asha_grace_steps": 250}}, r"asha_grace_steps = 250 must be below grpo.num"),
        ({"tune": {"search_algorithm": "optuna"}, "search": {"seed": {"grid": [0]}}},
         r"search.seed is a grid; give choice"),
        ({"search": {"grpo.num_minibatches": {"grid": [5, 7]}}},
         r"none of 2 points is valid, the first \(grpo.num_minibatches=5\): .*must divide"),
        ({"search": {"seed": {"grid": list(range(200))}, "grpo.lr": {"grid": [i / 200 for i in range(1, 100)]}}},
         r"more than 10,000 points"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(tmp_path, parts, message):
    with pytest.raises(ConfigError, match=message) as told:
        plan(tmp_path, **parts)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sed", "1"], r"unknown argument '--sed'; did you mean 'seed'"),
        (["--set", "grpo.lr"], r"--set 'grpo.lr': give NAME=VALUE"),
        (["--set", "grpo.lrr=1"], r"unknown setting 'grpo.lrr'; did you mean 'grpo.lr'"),
        (["--grpo.lr", "{grid: [1"], r"--grpo.lr '\{grid: \[1': not a YAML value"),
        (["--seeds", "a"], r"argument --seeds: invalid int value: 'a'"),
        (["--pipeline.lag", "3"], r"pipeline.lag is set by search.cases.a; change it in the file"),
    ],
)
def test_a_mistake_on_the_command_line_too(tmp_path, arguments, message):
    path = write(tmp_path, search={"cases": [{"name": "a", "pipeline.lag": 1}]})
    with pytest.raises(ConfigError, match=message):
        parse_sweep_command([str(path), *arguments])


# ---- the shipped files ----


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_typo_in_any_key_of_a_shipped_file_is_named_with_the_nearest_valid_one(tmp_path, path):
    text = re.sub("#.*", "", path.read_text(encoding="utf-8")).replace(
        "../scripts", str(path.parent.parent / "scripts")
    )
    keys = list(re.finditer(r"[\w.]+(?=:)", text))
    assert len(keys) > 5
    for key in keys:
        typo = key[0] + key[0][-1]  # the last letter doubled
        (tmp_path / "typo.yaml").write_text(text[: key.start()] + typo + text[key.end() :], encoding="utf-8")
        with pytest.raises(ConfigError) as raised:
            load_sweep(tmp_path / "typo.yaml")
        assert typo in str(raised.value)
        assert re.search(rf"did you mean '(\w+\.)*{re.escape(key[0])}'", str(raised.value)), (key, str(raised.value))


def test_the_study_of_rules_holds_the_settings_it_promises():
    trials = plan_trials(load_sweep(SHIPPED[0].parent / "rules.yaml"), Path("x")).trials
    assert len(trials) == (5 + 7 + 2 + 7 + 6) * 5
    assert {trial.config.pipeline.mode for trial in trials} == {"staleness"}
    seen = {
        (c.grpo.num_minibatches, c.grpo.lr, c.lag, c.rule, c.staleness.apply_to, c.grpo.correction)
        for c in (trial.config for trial in trials)
    }
    for updates, lr, lags, far in ((1, TINY_DEFAULTS["lr"], (0, 1, 2, 4, 8), 8), (4, 3e-4, (0, 1), 1)):
        plain = {(updates, lr, lag, "none", "update", "none") for lag in lags}
        rules = {(updates, lr, far, rule, "update", "none") for rule in ("kl", "version", "opsm", "m2po")}
        corrections = {(updates, lr, far, "none", "update", kind) for kind in ("truncated", "decoupled")}
        scaled = {(updates, lr, far, "kl", kind, "none") for kind in ("loss", "lr")}
        if updates == 1:
            scaled |= {(1, lr, far, "ess", "lr", "none"), (1, lr, far, "random", "update", "none")}
        assert plain | rules | corrections | scaled == {row for row in seen if row[0] == updates}
