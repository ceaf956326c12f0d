"""Reading runs: whole, growing, broken, many; and what is saved of them."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import read_jsonl, small
from study import modes, rows_of, write_run, write_sweep

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.reports.loading import load, load_or_explain, save
from overlaprl_ray.reports.run_files import TRAITS
from overlaprl_ray.runs.summary import BINS


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A real run, by the serial replay."""
    from overlaprl_ray.runtime.serial import train_serially

    folder = tmp_path_factory.mktemp("real") / "run"
    train_serially(small(pipeline={"mode": "overlap", "lag": 2}, output={"dir": str(folder), "eval_every": 2}))
    return folder


def test_a_real_run_as_its_files_have_it(real):
    results = load(real)
    config_row = results.trials.iloc[0]
    summary = json.loads((real / "summary.json").read_text())
    assert (config_row["trial"], config_row["status"], config_row["error"]) == ("run", "done", None)
    assert config_row["pipeline.mode"] == config_row["mode"] == "overlap"
    assert (config_row["pipeline.lag"], config_row["lag"], config_row["rule"], config_row["seed"]) == (2, 2, "kl", 0)
    assert config_row["task.rewards"] == '["dense_reward:digits"]'
    for name in ("accuracy_start", "accuracy_final", "reward_first_10", "reward_last_10", "steps", "tokens", "wall_s"):
        assert config_row[name] == summary[name]
    assert config_row["decisions.fresh"] == summary["decisions"]["fresh"]
    rows = read_jsonl(real / "metrics.jsonl")
    assert len(results.history) == len(rows)
    for index, row in enumerate(rows):
        for name, value in row.items():
            found = results.history.loc[index, name]
            assert pd.isna(found) if value is None else found == value
    assert results.evals[["step", "accuracy"]].to_dict("records") == [
        {"step": row["step"], "accuracy": row["accuracy"]} for row in read_jsonl(real / "eval.jsonl")
    ]
    assert results.problems == []


def test_decisions_of_a_real_run(real, tmp_path):
    results = load(real)
    expected = Counter()
    for row in read_jsonl(real / "decisions.jsonl"):
        for *bins, decision, rows in row["cells"]:
            for trait, name in zip(TRAITS, [*(BINS[b] for b in bins), str(row["lag"])], strict=True):
                expected[trait, name, decision] += rows
    assert results.decisions.set_index(["trait", "bin", "decision"])["rows"].to_dict() == expected
    growing = shutil.copytree(real, tmp_path / "growing")
    (growing / "summary.json").unlink()  # a run that goes on is counted from its rows
    order = ["trait", "bin", "decision"]
    whole, partly = (
        r.decisions.astype(str).sort_values(order)[[*order, "rows"]].to_numpy().tolist()
        for r in (results, load(growing))
    )
    assert whole == partly


def test_types_of_settings(tmp_path):
    write_sweep(tmp_path, random.Random(0), [{"grpo__lr": 1e-5}, {"grpo__lr": 1e-4, "grpo__clip_eps_high": 0.3}], 1)
    trials = load(tmp_path).trials
    assert trials["grpo.lr"].dtype == np.float64
    assert trials["grpo.num_steps"].dtype == np.int64
    assert trials["grpo.scale_rewards"].dtype == np.bool_
    assert trials["grpo.clip_eps_high"].dtype == np.float64
    assert trials["pipeline.mode"].dtype == "str"


# ---- which folders ----


def test_runs_sweeps_and_folders_of_them(tmp_path):
    rng = random.Random(0)
    write_run(tmp_path / "all" / "one", rng)
    write_sweep(tmp_path / "all" / "sweep", rng, modes(1), seeds=2)
    save(load(tmp_path / "all" / "sweep"), tmp_path / "all" / "tables")
    assert len(load(tmp_path / "all" / "one").trials) == 1
    assert len(load(tmp_path / "all" / "sweep").trials) == 8
    everything = load(tmp_path / "all")
    assert len(everything.trials) == 1 + 8 + 8
    assert everything.trials["trial"].is_unique
    assert len(everything.history) == 17 * 24
    assert everything.history.groupby("trial", observed=True).size().tolist() == [24] * 17
    twice = load(tmp_path / "all" / "sweep", tmp_path / "all" / "sweep" / "trials", tmp_path / "all" / "one")
    assert len(twice.trials) == 9
    assert set(twice.trials["source"]) == {"sweep", "one"}


def test_order_is_that_of_the_settings(tmp_path):
    settings = [{"pipeline__mode": m, "pipeline__lag": lag} for m in ("overlap", "sync", "async") for lag in (8, 2)]
    write_sweep(tmp_path, random.Random(0), settings, seeds=2)
    trials = load(tmp_path).trials
    found = list(zip(trials["mode"], trials["lag"], trials["seed"], strict=True))
    ahead = [(m, lag, seed) for m in ("async", "overlap") for lag in (2, 8) for seed in (0, 1)]
    assert found == [("sync", 0, 0), ("sync", 0, 0), ("sync", 0, 1), ("sync", 0, 1), *ahead]


@pytest.mark.parametrize("make", [lambda f: None, lambda f: f.mkdir(), lambda f: (f / "x" / "y").mkdir(parents=True),
                                  lambda f: f.write_text("a file")])  # fmt: skip
def test_nothing_to_read_is_one_line(tmp_path, make, capsys):
    folder = tmp_path / "nothing"
    make(folder)
    with pytest.raises(ConfigError, match=r"folder '.*nothing': (no such folder|holds no run)") as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    assert load_or_explain(folder).trials.empty
    assert capsys.readouterr().out.strip() == str(raised.value)


# ---- broken ones ----


def test_a_run_that_goes_on_shows_how_far_it_is(tmp_path):
    folder = write_run(tmp_path / "run", random.Random(0), status=None)
    rows, evals = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "eval.jsonl")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "version": 2')  # being written just now
    results = load(folder)
    trial = results.trials.iloc[0]
    assert (trial["status"], trial["steps"], trial["tokens"]) == ("running", 24, rows[-1]["tokens"])
    assert trial["reward_last_10"] == pytest.approx(sum(row["reward"] for row in rows[-10:]) / 10)
    assert trial["accuracy_best"] == max(row["accuracy"] for row in evals)
    assert pd.isna(trial["accuracy_final"])
    assert results.problems == [f"{folder / 'metrics.jsonl'}: the last line is cut short; left out"]


def test_an_error_file_makes_an_error_row(tmp_path):
    write_run(tmp_path / "a" / "trials" / "x", random.Random(0), steps=3, status="failed")
    (tmp_path / "a" / "trials" / "x" / "error.txt").write_text("the generator died\n")
    (tmp_path / "a" / "trials" / "y").mkdir()
    (tmp_path / "a" / "trials" / "y" / "error.txt").write_text("no room")
    (tmp_path / "a" / "trials" / "z").mkdir()
    results = load(tmp_path / "a")
    found = results.trials.set_index("trial")[["status", "error"]].to_dict("index")
    assert found == {
        "x": {"status": "error", "error": "the generator died"},
        "y": {"status": "error", "error": "no room"},
    }
    assert results.problems == [f"{tmp_path / 'a' / 'trials' / 'z'}: holds no file of a run; left out"]


def damage(folder: Path, name: str) -> None:
    text = (folder / name).read_bytes()
    (folder / name).write_bytes(text[: len(text) // 2])


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl", "eval.jsonl", "decisions.jsonl"])
def test_a_half_written_file_costs_only_what_it_held(tmp_path, name):
    write_sweep(tmp_path, random.Random(0), modes(1), seeds=1)
    damage(tmp_path / "trials" / "t0000", name)
    if name == "decisions.jsonl":
        (tmp_path / "trials" / "t0000" / "summary.json").unlink()  # which would have its counts
    results = load(tmp_path)
    assert len(results.trials) == 4
    assert len(results.problems) == 1
    assert name in results.problems[0]
    assert results.trials["mode"].notna().sum() == (3 if name == "config.yaml" else 4)


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", "null\n", "[1, 2]\n", '{"step": 1}\n', "not json\n", '{"step": "one", "reward": 2}\n',
     '{"step": 1, "wall_s": 1, "tokens": 1, "reward": "high"}\n', "\x00\x01\n", '{"step": 1, "step": 2}\n'],
)  # fmt: skip
@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "decisions.jsonl"])
def test_files_of_anything_are_left_out(tmp_path, name, content):
    write_sweep(tmp_path, random.Random(0), modes(1), seeds=1)
    (tmp_path / "trials" / "t0010" / name).write_text(content)
    if name == "decisions.jsonl":
        (tmp_path / "trials" / "t0010" / "summary.json").unlink()
    results = load(tmp_path)
    assert len(results.trials) == 4
    table = {"metrics.jsonl": results.history, "eval.jsonl": results.evals, "decisions.jsonl": results.decisions}[name]
    assert "t0010" not in set(table["trial"])
    assert len(results.problems) == (0 if not content.strip() else 1)


def test_a_broken_line_in_the_middle_costs_that_line(tmp_path):
    folder = write_run(tmp_path / "run", random.Random(0))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[4] = lines[4][:20]
    lines[7] = lines[6]  # a step twice
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    results = load(folder)
    assert sorted(set(range(1, 25)) - set(results.history["step"])) == [5, 8]
    assert len(results.history) == 22
    assert results.problems == [f"{folder / 'metrics.jsonl'}: 1 of 24 lines cannot be read; left out"]


def test_runs_of_other_columns_stand_together(tmp_path):
    write_run(tmp_path / "a", random.Random(0))
    folder = write_run(tmp_path / "b", random.Random(1))
    rows = [{**row, "rewards/mine/mean": 0.5, "loss": None} for row in rows_of(random.Random(1), 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = load(tmp_path).history
    assert history.groupby("trial", observed=True)["rewards/mine/mean"].count().to_dict() == {"a": 0, "b": 5}


# ---- saved tables ----


def test_saved_tables_come_back_as_they_were(tmp_path):
    write_sweep(tmp_path / "sweep", random.Random(0), modes(1, 8), seeds=2)
    results = load(tmp_path / "sweep")
    save(results, tmp_path / "tables")
    again = load(tmp_path / "tables")
    for name in ("history", "evals", "decisions"):
        pd.testing.assert_frame_equal(
            getattr(again, name), getattr(results, name), check_dtype=False, check_categorical=False
        )
    hidden = ["folder", "source"]
    pd.testing.assert_frame_equal(again.trials.drop(columns="source"), results.trials.drop(columns=hidden))
    assert str(tmp_path) not in (tmp_path / "tables" / "trials.parquet").read_bytes().decode("latin1")


@pytest.mark.parametrize(("name", "runs"), [("study", 35), ("rules", 105)])
def test_the_committed_studies_are_whole_and_small(name, runs):
    folder = Path(__file__).parent.parent / "analysis" / "results" / name
    results = load(folder)
    assert list(results.trials["status"]) == ["done"] * runs
    assert len(results.history) == runs * 250
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000


@pytest.mark.parametrize("name", ["trials", "history", "evals", "decisions"])
def test_saved_tables_that_are_broken_or_gone(tmp_path, name):
    write_sweep(tmp_path / "sweep", random.Random(0), modes(1), seeds=1)
    save(load(tmp_path / "sweep"), tmp_path / "tables")
    path = tmp_path / "tables" / f"{name}.parquet"
    for make in (
        lambda: damage(path.parent, path.name),
        lambda: pd.DataFrame({"x": [1]}).to_parquet(path),
        path.unlink,
    ):
        make()
        if name == "trials":
            with pytest.raises(ConfigError):
                load(tmp_path / "tables")
        else:
            results = load(tmp_path / "tables")
            assert getattr(results, name).empty
            assert len(results.trials) == 4
            assert name in results.problems[0]


# ---- thousands ----

BIG = """
import resource, sys, time
from overlaprl_ray.reports.comparison import compare, default_baseline, ranking
from overlaprl_ray.reports.tables import load, notes, summary_table, display_table
start = time.monotonic()
results = load(sys.argv[1])
table = summary_table(results)
compare(results, default_baseline(results), "reward", "seconds")
ranking(results)
display_table(results), notes(results)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(len(results.trials), len(results.history), len(table), time.monotonic() - start, time.process_time(), peak)
"""


@pytest.mark.slow
def test_two_thousand_runs_of_five_hundred_steps(tmp_path):
    """Loaded and aggregated in under a minute and 4 GiB. Rows are shared by hard links: they are read all the same."""
    rng = random.Random(0)
    written = [write_run(tmp_path / "source" / str(i), rng, steps=500, eval_every=50) for i in range(20)]
    for path in written:  # as many columns as a real run has
        rows = [
            {**row, **{f"extra/{i}": rng.random() for i in range(24)}} for row in read_jsonl(path / "metrics.jsonl")
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (written[0] / "config.yaml").read_text()
    for number in range(2000):
        folder = tmp_path / "sweep" / "trials" / f"{number:012x}"
        folder.mkdir(parents=True)
        source = written[number % 20]
        for name in ("metrics.jsonl", "eval.jsonl", "decisions.jsonl", "summary.json"):
            os.link(source / name, folder / name)
        text = config.replace("\nseed: 0\n", f"\nseed: {number % 5}\n").replace(
            "lr: 0.001\n", f"lr: {0.001 + number // 5 / 1e6}\n"
        )
        (folder / "config.yaml").write_text(text)
    found = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path / "sweep")], capture_output=True, text=True, check=True
    )
    trials, rows, settings, wall, cpu, peak = (float(number) for number in found.stdout.split())
    print(f"wall {wall:.1f} s, cpu {cpu:.1f} s, {peak:.2f} GiB")
    assert (trials, rows, settings) == (2000, 1_000_000, 400)
    assert wall < 60
    assert peak < 4
