"""Aggregation of run folders and rows with known answers, and the script itself on two short runs."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import read_jsonl, small
from overlaprl_ray.reports.benchmark import BenchmarkPlan, compare, read_run, seconds_to, variants
from overlaprl_ray.reports.benchmark_report import tables, write_report
from rich.console import Console

ROOT = Path(__file__).parent.parent
STAGES = {"generate_s": 1.0, "reference_s": 0.4, "train_s": 0.8, "weights_s": 0.1}  # 2.3 s in a row


def row(label, repeat, step_s, threads=1, **more):
    """A run's row as `read_run` makes it."""
    lag = 0 if label.startswith("sync") else 1
    rates = {"steps_per_s": 1 / step_s, "tokens_per_s": 100 / step_s, "samples_per_s": 10 / step_s}
    learned = {"reward_first_10": 0.2, "reward_last_10": 0.4, "accuracy_start": 0.3, "accuracy_final": 0.5}
    return {
        "label": label, "mode": label.split()[0], "repeat": repeat, "threads": threads, "seed": repeat, "lag": lag,
        "steps": 20, "step_s": step_s, **rates, **STAGES, "learner_wait_s": 0.1, "generator_wait_s": 0.2,
        "overlap_fraction": 0.0 if lag == 0 else 1.0, **learned, "seconds_to_target": None, "fresh": 20, "stale": 0,
        "discard": 0, "memory/generator_gb": 0.4, "wall_s": 30.0, "folder": "x", **more,
    }  # fmt: skip


def found(rows, cores=2, target=None):
    """A whole benchmark.json around rows."""
    where = {
        "cpu": "a CPU",
        "cpus": 2,
        "gpus": [],
        "git_commit": "0123456789abcdef",
        "versions": {"torch": "2", "ray": "2"},
    }
    return {"config": small().model_dump(mode="json"), "repeats": 3, "target_accuracy": target, "cores": cores,
            "environment": where, "modes": compare(rows, cores), "runs": rows}  # fmt: skip


def three(label, *step_times, **more):
    return [row(label, repeat, step, **more) for repeat, step in enumerate(step_times, start=1)]


def test_speed_up_is_a_ratio_of_medians_and_ranges_pair_repeats():
    sync, overlap = compare(three("sync", 2.4, 2.5, 5.0) + three("overlap", 1.25, 1.2, 2.6), cores=2)
    assert (sync["step_s"], sync["step_s_min"], sync["step_s_max"]) == (2.5, 2.4, 5.0)
    assert sync["speed_up"] == 1.0
    assert overlap["speed_up"] == pytest.approx(2.5 / 1.25)
    assert overlap["speed_up_min"] == pytest.approx(2.4 / 1.25)
    assert overlap["speed_up_max"] == pytest.approx(2.5 / 1.2)


@pytest.mark.parametrize(
    ("mode", "cores", "bound"),
    [
        ("overlap", None, 1.15),  # serial / (lag + 1) = 2.3 / 2 exceeds the longest lane, 0.1 + 1.0
        ("async", None, 1.2),  # the learner's lane: reference and training
        ("overlap", 2, 1.15),
        ("overlap", 1, 2.3),  # one core cannot overlap anything
    ],
)
def test_efficiency_is_the_bound_of_syncs_stages_over_the_step_time(mode, cores, bound):
    # the mode's own stages are slow, as they are when they share cores: they must not enter the bound
    rows = three("sync", 2.4, 2.4, 2.4) + three(mode, 1.6, 1.6, 1.6, generate_s=9.0, train_s=9.0)
    sync, other = compare(rows, cores)
    assert other["bound_s"] == pytest.approx(bound)
    assert other["efficiency"] == pytest.approx(bound / 1.6)
    assert sync["serial_s"] == pytest.approx(2.3)
    assert sync["step_over_serial"] == pytest.approx(2.4 / 2.3)


def test_more_threads_are_held_to_their_own_stages_and_to_plain_sync():
    fast = dict.fromkeys(STAGES, 0.3)
    rows = three("sync", 2.4, 2.4, 2.4) + three("sync (2 threads)", 1.6, 1.6, 1.6, threads=2, **fast)
    _, two, overlap = compare(rows + three("overlap", 1.2, 1.2, 1.2), cores=2)
    assert overlap["speed_up"] == pytest.approx(2.0)
    assert overlap["speed_up_over_fastest_sync"] == pytest.approx(1.6 / 1.2)
    assert two["serial_s"] == pytest.approx(1.2)
    assert two["speed_up"] == pytest.approx(1.5)


def test_without_sync_there_is_nothing_to_compare_with():
    (only,) = compare(three("overlap", 1.0, 1.0, 1.0), cores=2)
    assert only["speed_up"] is None
    assert only["efficiency"] is None


def test_no_reference_model_counts_as_no_time():
    (sync,) = compare(three("sync", 2.0, 2.0, 2.0, reference_s=None), cores=2)
    assert sync["reference_s"] is None
    assert sync["serial_s"] == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("times", "expected"), [((5.0, None, 7.0), 7.0), ((5.0, None, None), None), ((1.0, 2.0, 9.0), 2.0)]
)
def test_a_target_that_most_runs_miss_has_no_median(times, expected):
    rows = [row("sync", repeat, 1.0, seconds_to_target=value) for repeat, value in enumerate(times)]
    assert compare(rows, cores=2)[0]["seconds_to_target"] == expected


def test_seconds_to_target():
    evaluations = [{"step": 0, "accuracy": 0.2}, {"step": 10, "accuracy": 0.6}, {"step": 20, "accuracy": 0.5}]
    rows = [{"step": step, "wall_s": 2.0 * step} for step in range(1, 21)]
    assert seconds_to(0.2, evaluations, rows) == 0.0
    assert seconds_to(0.5, evaluations, rows) == 20.0
    assert seconds_to(0.7, evaluations, rows) is None
    assert seconds_to(None, evaluations, rows) is None


def test_read_run(tmp_path):
    config = small(pipeline={"mode": "overlap"}, seed=4)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (tmp_path / "summary.json").write_text(json.dumps({
        "lag": 1, "overlap_fraction": 0.9, "reward_first_10": 0.1, "reward_last_10": 0.2, "accuracy_start": 0.3,
        "accuracy_final": 0.4, "decisions": {"fresh": 8, "stale": 1, "discard": 1}, "wall_s": 50.0}))  # fmt: skip
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "accuracy": 0.3}\n{"step": 10, "accuracy": 0.4}\n')
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 11):
            times = {
                "time/step": 9.0 if step <= 5 else (4.0 if step == 6 else 1.0),
                "time/generate": 0.5,
                "time/train": 0.4,
            }
            waits = {"time/learner_wait": 0.1, "time/generator_wait": 0.2, "time/reference": None, "time/weights": 0.01}
            memory = {"memory/generator_gb": 0.1 * step, "memory/learner_gb": 0.5}
            totals = {"step": step, "wall_s": 3.0 * step, "tokens": 100 * step, "samples": 8 * step}
            file.write(json.dumps({**totals, **times, **waits, **memory}) + "\n")
    got = read_run(tmp_path, "overlap", 2, target_accuracy=0.35)
    assert (got["label"], got["mode"], got["repeat"], got["seed"], got["threads"]) == ("overlap", "overlap", 2, 4, 1)
    assert got["step_s"] == 1.0  # median of 4, 1, 1, 1, 1: warm-up is left out
    assert got["steps_per_s"] == pytest.approx(5 / 8)
    assert got["tokens_per_s"] == pytest.approx(500 / 8)
    assert got["samples_per_s"] == pytest.approx(40 / 8)
    assert got["reference_s"] is None
    assert got["memory/generator_gb"] == pytest.approx(1.0)
    assert got["seconds_to_target"] == 30.0
    assert (got["fresh"], got["stale"], got["discard"]) == (8, 1, 1)


def test_variants():
    made = variants(small(), BenchmarkPlan(["sync", "overlap"], threads_sync=(1, 2)))
    assert list(made) == ["sync", "sync (2 threads)", "overlap"]
    assert [(c.pipeline.mode, c.resources.threads) for c in made.values()] == [("sync", 1), ("sync", 2), ("overlap", 1)]
    assert len({c.grpo.model_dump_json() for c in made.values()}) == 1


def test_report_says_what_it_was_measured_on(tmp_path):
    whole = found(three("sync", 2.4, 2.5, 2.6) + three("overlap", 1.3, 1.25, 1.4), target=0.6)
    write_report(tmp_path, whole)
    assert json.loads((tmp_path / "benchmark.json").read_text()) == whole
    with (tmp_path / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {r["commit"] for r in rows} == {"0123456789abcdef"}
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(tables(whole))
    text = console.export_text()
    assert "…" not in text  # nothing is cut short on a narrow terminal
    for part in ("overlap", "1.92", "1.85–2.00", "a CPU", "commit 0123456789", "s to 0.6", "1.09 × their sum"):
        assert part in text


def test_script(tmp_path, cache):
    """All of it once, as a user calls it."""
    options = ["--steps", "4", "--repeats", "1", "--modes", "sync", "overlap", "--threads-sync", "1"]
    tiny = ["--model.tiny.warm_start_max_steps", "40", "--model.tiny.warm_start_batch", "64", "--task.eval_size", "16",
            "--grpo.num_prompts_per_step", "4", "--grpo.group_size", "4"]  # fmt: skip
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "scripts" / "benchmark.py", "--model", "tiny", *options, *tiny, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "benchmark.json").read_text())
    assert [run["label"] for run in result["runs"]] == ["sync", "overlap"]
    assert all(run["steps"] == 4 and run["step_s"] > 0 for run in result["runs"])
    assert result["config"]["grpo"]["num_steps"] == 4
    sync, overlap = result["modes"]
    assert sync["overlap_fraction"] == 0.0
    assert overlap["speed_up"] == pytest.approx(sync["step_s"] / overlap["step_s"])
    first, second = (read_jsonl(out / f"r1-{mode}" / "metrics.jsonl")[0] for mode in ("sync", "overlap"))
    assert first["reward"] == second["reward"]  # the same model, prompts and samples
    assert (out / "benchmark.png").exists()
    assert "speed-up" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert again.returncode == 2
    assert f"output.dir = '{out}'" in again.stderr
