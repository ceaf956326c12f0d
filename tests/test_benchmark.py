"""scripts/benchmark.py: aggregation with known answers, and the script itself on two short runs."""

import json
import sys
from pathlib import Path

import pytest
from conftest import read_jsonl

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from benchmark import compare, figures_of, main, variants  # noqa: E402

from overlaprl_ray.errors import ConfigError  # noqa: E402

STAGES = {"generate": 1.0, "reference": 0.4, "train": 0.8, "weights": 0.1, "publish": 0.0}  # 2.3 s in a row


def three(label, *step_times, stages=None, **more):
    mode = label.split(",")[0]
    return [{"label": label, "mode": mode, "step_s": s, "stages": stages or STAGES, **more} for s in step_times]


def test_speed_up_is_a_ratio_of_medians():
    sync, overlap = compare(three("sync", 2.4, 2.5, 5.0) + three("overlap", 1.25, 1.2, 2.6), 1, 2)
    assert (sync["step_s"], sync["step_s_range"], sync["speed_up"]) == (2.5, [2.4, 5.0], 1.0)
    assert overlap["speed_up"] == pytest.approx(2.5 / 1.25)
    assert compare(three("overlap", 1.0), 1, 2)[0]["efficiency"] is None  # nothing to compare with


@pytest.mark.parametrize(
    ("mode", "lag", "cores", "bound"),
    [
        ("overlap", 1, 2, 1.15),  # half of 2.3
        ("overlap", 4, 4, 1.1),  # generate + load
        ("overlap", 4, None, 1.1),
        ("async", 4, None, 1.2),  # train + reference
        ("sync", 4, 2, 2.3),
    ],
)
def test_efficiency_is_the_bound_of_syncs_stages_over_the_step_time(mode, lag, cores, bound):
    """A mode's own stages, slowed down by each other, do not count."""
    slow = {name: 2 * value for name, value in STAGES.items()}
    rows = three("sync", 2.5) + (three(mode, 2.0, stages=slow) if mode != "sync" else [])
    row = compare(rows, lag, cores)[-1]
    assert row["efficiency"] == pytest.approx(bound / row["step_s"])


def test_a_target_that_most_runs_miss_has_no_median():
    rows = [row | {"s": s} for row, s in zip(three("sync", 1.0, 1.0, 1.0), (None, 3.0, None), strict=True)]
    assert compare(rows, 1, 2)[0]["s"] is None
    found = compare([*rows[:2], rows[1]], 1, 2)[0]
    assert (found["s"], found["s_range"]) == (3.0, [3.0, None])


def test_variants():
    assert variants(["sync", "overlap"], 1, [1, 2]) == {
        "sync": ("sync", 1),
        "overlap": ("overlap", 1),
        "sync, 2 threads": ("sync", 2),
    }
    assert variants(["overlap"], 1, [2]) == {"overlap": ("overlap", 1)}


def test_figures_of_a_run(tmp_path):
    rows = [
        {"step": s, "wall_s": 3.0 * s, "memory/learner_gb": 0.5, "memory/generator_gb": 0.1 * s} for s in range(1, 11)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "accuracy": 0.3}\n{"step": 10, "accuracy": 0.4}\n')
    summary = {"steps_per_s": 0.5, "overlap_fraction": 0.9, "tokens": 1000, "steps": 10, "reward_last_10": 0.2,
               "accuracy_final": 0.4, "stages_s": STAGES}  # fmt: skip
    got = figures_of(tmp_path, summary, target=0.35)
    assert (got["step_s"], got["tokens_per_s"], got["seconds_to_target"]) == (2.0, 50.0, 30.0)
    assert got["memory_gb"] == pytest.approx(1.5)
    assert figures_of(tmp_path, summary, target=0.3)["seconds_to_target"] == 0.0
    assert figures_of(tmp_path, summary, target=0.5)["seconds_to_target"] is None


@pytest.mark.ci
def test_script(tmp_path, local_ray, capsys):
    """All of it once, as a user calls it."""
    out = tmp_path / "out"
    tiny = ["--task.eval_size", "16", "--grpo.num_prompts_per_step", "4", "--grpo.group_size", "4"]
    command = ["--model", "tiny", "--steps", "4", "--repeats", "1", "--modes", "sync", "overlap", "--out", str(out)]
    main([*command, *tiny, "--threads-sync", "1"])
    result = json.loads((out / "benchmark.json").read_text())
    assert [run["label"] for run in result["runs"]] == ["sync", "overlap"]
    assert result["config"]["grpo"]["num_steps"] == 4
    sync, overlap = result["modes"]
    assert sync["overlap_fraction"] == 0.0
    assert overlap["speed_up"] == pytest.approx(sync["step_s"] / overlap["step_s"])
    first, second = (read_jsonl(out / f"r1-{mode}" / "metrics.jsonl")[0] for mode in ("sync", "overlap"))
    assert first["reward"] == second["reward"]  # the same model, prompts and samples
    said = capsys.readouterr().out
    assert "efficiency" in said
    assert max(map(len, said.splitlines())) <= 200
    with pytest.raises(ConfigError, match="holds another run"):
        main([*command, *tiny])
    with pytest.raises(ConfigError, match="not a whole number"):
        main(["--repeats", "0"])
