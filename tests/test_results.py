"""The summary table against plain Python, and what people are shown of it."""

import io
import json
import math
import random
import statistics as plain
from dataclasses import replace

import numpy as np
import pytest
from conftest import read_jsonl
from rich.console import Console
from scipy import stats
from study import modes, write_run, write_sweep

from overlaprl_ray.config.cli import build_config, merge
from overlaprl_ray.reports.loading import load
from overlaprl_ray.reports.tables import (
    default_target,
    display_table,
    markdown,
    never_overlapped,
    notes,
    summary_table,
    terminal_table,
    write_tables,
)
from overlaprl_ray.reports.trials import effective, labels, varying


@pytest.fixture
def random_sweep(tmp_path, request):
    """A random study: some settings, some seeds, lengths, failures and repeats."""
    rng = random.Random(request.param)
    settings = rng.sample(modes(1, 2, 8), rng.randint(1, 5))
    for number, values in enumerate(settings):
        for seed in range(rng.randint(1, 4)):
            status = rng.choice(["done", "done", "done", "failed", None])
            steps = rng.choice([8, 24]) if status != "done" else 24
            write_run(tmp_path / f"{number}{seed}", rng, steps=steps, status=status, seed=seed, **values)
    write_run(tmp_path / "repeat", rng, seed=0, **settings[0])
    return tmp_path


@pytest.mark.parametrize("random_sweep", range(12), indirect=True)
def test_summary_is_what_plain_python_makes_of_the_files(random_sweep):
    results = load(random_sweep)
    table = summary_table(results, target=0.5)
    runs = []
    for folder in sorted(random_sweep.iterdir()):
        config = build_config(merge({}, read_yaml(folder)))
        path = folder / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {"status": "running"}
        runs.append((config, summary, read_jsonl(folder / "metrics.jsonl")))
    key = lambda config: (config.pipeline.mode, config.lag)  # noqa: E731
    expected = {}
    for config, summary, rows in runs:
        expected.setdefault(key(config), {"not_done": 0, "seeds": {}})
        if summary["status"] == "done":
            expected[key(config)]["seeds"].setdefault(config.seed, []).append((summary, rows))
        else:
            expected[key(config)]["not_done"] += 1
    assert len(table) == len(expected)
    for row in table.to_dict("records"):
        mode = row.get("mode", runs[0][0].pipeline.mode)
        lag = 0 if mode == "sync" else row.get("lag", next(c.lag for c, _, _ in runs if c.pipeline.mode == mode))
        check_row(row, **expected[mode, lag])


def read_yaml(folder):
    import yaml

    return yaml.safe_load((folder / "config.yaml").read_text())


def check_row(row, not_done, seeds):
    def means(value):
        return [plain.fmean(value(*repeat) for repeat in repeats) for repeats in seeds.values()]

    assert (row["n"], row["runs_not_done"]) == (len(seeds), not_done)
    for name, column in (("reward", "reward_last_10"), ("accuracy", "accuracy_final")):
        values = means(lambda summary, rows, column=column: summary[column])
        mean, low, high = naive_interval(values)
        np.testing.assert_allclose([row[name], row[f"{name}_low"], row[f"{name}_high"]], [mean, low, high], rtol=1e-9)
    reached = means(lambda summary, rows: naive_seconds(rows, 0.5))
    middle = plain.median(reached) if reached else math.inf
    np.testing.assert_allclose(row["seconds_to_target"], middle if math.isfinite(middle) else math.nan)
    assert row["reached"] == sum(map(math.isfinite, reached))
    for name in ("wall_s", "steps_per_s", "tokens"):
        values = means(lambda summary, rows, name=name: summary[name])
        np.testing.assert_allclose(row[name], plain.fmean(values) if values else math.nan)
    for name in ("fresh", "stale", "discard"):
        values = means(lambda summary, rows, name=name: summary["decisions"][name] / summary["steps"])
        np.testing.assert_allclose(row[name], plain.fmean(values) if values else math.nan)


def naive_interval(values):
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan, math.nan
    half = stats.t.ppf(0.975, len(values) - 1) * plain.stdev(values) / math.sqrt(len(values))
    return plain.fmean(values), plain.fmean(values) - half, plain.fmean(values) + half


def naive_seconds(rows, target):
    for end in range(10, len(rows) + 1):
        if plain.fmean(row["reward"] for row in rows[end - 10 : end]) >= target:
            return rows[end - 1]["wall_s"]
    return math.inf


def test_varying_leaves_out_what_has_no_effect(tmp_path):
    settings = [
        *modes(1, 8),
        {"pipeline__mode": "sync", "pipeline__lag": 8},
        {"pipeline__mode": "staleness", "pipeline__lag": 8, "staleness__rule": "version", "staleness__kl_fresh": 0.01},
    ]
    write_sweep(tmp_path, random.Random(0), settings, seeds=2)
    trials = load(tmp_path).trials
    trials.loc[0, "output.eval_every"] = 7
    trials.loc[0, "pipeline.timeout_s"] = 7.0
    assert varying(trials) == ["pipeline.mode", "pipeline.lag", "staleness.rule"]
    assert set(labels(trials)) == {
        "mode sync", "mode async, lag 1", "mode async, lag 8", "mode staleness, lag 1, rule kl",
        "mode staleness, lag 8, rule kl", "mode overlap, lag 1, rule kl", "mode overlap, lag 8, rule kl",
        "mode staleness, lag 8, rule version",
    }  # fmt: skip
    sync = effective(trials)[trials["mode"] == "sync"]
    assert set(sync["pipeline.lag"]) == set(sync["staleness.rule"]) == set(sync["staleness.kl_fresh"]) == {"-"}
    table = summary_table(load(tmp_path))
    assert list(table.columns[:4]) == ["mode", "lag", "rule", "n"]
    assert table.iloc[0][["mode", "lag", "rule", "n"]].to_list() == ["sync", "-", "-", 2]  # lag 1 and 8: one setting


def test_settings_that_differ_in_the_tenth_digit_are_two(tmp_path):
    write_sweep(tmp_path, random.Random(0), [{"grpo__lr": 0.00123456789}, {"grpo__lr": 0.00123456788}], seeds=1)
    assert list(labels(load(tmp_path).trials)) == ["lr 0.00123456788", "lr 0.00123456789"]
    assert len(summary_table(load(tmp_path))) == 2


def test_names_that_would_clash_stay_whole(tmp_path):
    write_sweep(tmp_path, random.Random(0), [{"model__tiny__seed": 1}, {"model__tiny__seed": 2}], 1)
    assert list(summary_table(load(tmp_path)).columns[:2]) == ["seed", "n"]
    write_run(tmp_path / "trials" / "x", random.Random(0), task__eval_size=8, model__dtype="bfloat16")
    assert set(labels(load(tmp_path).trials)) >= {"dtype bfloat16, seed 0, eval_size 8"}


def test_default_target_is_nine_tenths_of_the_way(tmp_path):
    results = load(write_sweep(tmp_path, random.Random(0), modes(1), seeds=2))
    start = plain.fmean(results.trials["reward_first_10"])
    best = max(plain.fmean(group) for _, group in results.trials.groupby("mode")["reward_last_10"])
    assert default_target(results) == (None if best <= start else round(start + 0.9 * (best - start), 3))
    flat = replace(results, trials=results.trials.assign(reward_last_10=0.0))
    assert default_target(flat) is None
    assert "s to target" not in display_table(flat)


def test_one_seed_and_one_run_show_no_interval(tmp_path):
    results = load(write_run(tmp_path / "run", random.Random(0)))
    text = display_table(results).iloc[0]
    assert text["seeds"] == "1"
    assert "±" not in text["final reward"]
    assert "[" not in text["final reward"]
    assert (
        "±" in display_table(load(write_sweep(tmp_path / "s", random.Random(0), modes(1), 2))).iloc[0]["final reward"]
    )


def test_page_and_terminal_say_the_same(tmp_path):
    write_sweep(tmp_path, random.Random(0), modes(1, 8), seeds=3)
    write_run(tmp_path / "trials" / "dead", random.Random(1), steps=4, status="failed", pipeline__mode="sync", seed=9)
    (tmp_path / "trials" / "dead" / "error.txt").write_text("the learner died | at once")
    results = load(tmp_path)
    page = markdown(results, "Modes")
    assert page.startswith("# Modes\n\n| mode | lag | seeds | not done | final reward |")
    assert "22 runs: 21 done, 1 error; only finished ones count." in page
    assert "- dead: the learner died | at once" in page
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal_table(results))
    printed = console.export_text()
    for _, row in display_table(results).iterrows():
        line = next(
            line for line in printed.splitlines() if line.startswith(row["mode"]) and row["final reward"] in line
        )
        assert all(cell in line for cell in row)
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(terminal_table(results, width=80))
    text = narrow.export_text()
    assert all(mode in text for mode in ("sync", "async", "staleness", "overlap"))
    assert "…" not in text
    shown = display_table(results)
    differ = shown.loc[:, shown.nunique() > 1]  # what is the same in every row is left out
    assert "fresh/stale/discard" in text
    assert "seeds" in text
    assert all(cell in text for _, row in differ.iterrows() for cell in row)  # in blocks
    assert max(len(line) for line in text.splitlines()) <= 80


def test_cases_keep_their_name(tmp_path):
    """What makes a case is not listed; what differs within one is."""
    loss = {"staleness__rule": "none", "grpo__correction": "truncated", "pipeline__mode": "async"}
    write_sweep(
        tmp_path, random.Random(0), [{"pipeline__mode": "sync"}, *({**loss, "grpo__lr": r} for r in (1e-4, 2e-4))], 2
    )
    plan = [
        {"trial": f"t{number:03}{seed}", "case": "plain" if number == 0 else "capped"}
        for number in range(3)
        for seed in range(2)
    ]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    results = load(tmp_path)
    assert set(results.settings) == {"plain, lr 0.0004", "capped, lr 0.0001", "capped, lr 0.0002"}
    assert list(summary_table(results).columns[:2]) == ["case", "lr"]
    assert "| capped | 0.0002 |" in markdown(results, "Cases")


def test_notes_tell_of_repeats_machines_and_clocks(tmp_path):
    write_sweep(tmp_path, random.Random(0), modes(1), seeds=1)
    write_run(tmp_path / "trials" / "again", random.Random(1), pipeline__mode="sync")
    for number, path in enumerate(sorted((tmp_path / "trials").iterdir())):
        (path / "environment.json").write_text(json.dumps({"cpu": f"cpu {number % 2}", "versions": {}, "gpus": []}))
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**summary, "overlap_fraction": 0.0}))
    results = load(tmp_path)
    said = "\n".join(notes(results))
    assert "1 runs repeat a setting and seed; repeats are averaged, not counted." in said
    assert "2 different CPUs" in said
    assert never_overlapped(results) == 3
    assert "3 runs with batches ahead never overlapped" in said


def test_tables_as_files(tmp_path):
    write_sweep(tmp_path / "sweep", random.Random(0), [{"grpo__lr": 1e-3}, {"task__rewards": ["math"]}], seeds=2)
    results = load(tmp_path / "sweep")
    numbers, texts = summary_table(results), display_table(results)
    write_tables({"summary": (numbers, texts)}, tmp_path / "tables")
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["summary.csv", "summary.md", "summary.tex"]
    import pandas as pd

    back = pd.read_csv(tmp_path / "tables" / "summary.csv")
    np.testing.assert_allclose(back["reward"], numbers["reward"])
    latex = (tmp_path / "tables" / "summary.tex").read_text()
    assert latex.count(r"\\") == 1 + len(texts)
    assert r"fresh/stale/discard, \%" in latex
    assert "±" in latex
