"""`scripts/sweep.py` as a user calls it: the shipped files, a kill in its middle, a cluster of two nodes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml
from test_sweep_run import BASE, ROOT, merged, resumed_after, same_rows, script, trials_of

from overlaprl_ray import ConfigError
from overlaprl_ray.runs.recorder import is_time_field

SMOKE = ROOT / "tune_configs" / "smoke.yaml"
SHIPPED = sorted((ROOT / "tune_configs").glob("*.yaml"))


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "sweep.py"), *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**own, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **more}


def call(*arguments: object, expected: int = 0, **more: str) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(**more), timeout=1500)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- the shipped files ----


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_short_and_dry_run(tmp_path, capsys, path):
    assert len(path.read_text().splitlines()) <= 40
    arguments = [path, "--dry-run", "--dir", tmp_path / "s"]
    if "smollm2" in path.read_text().lower():  # its model may be out of reach
        arguments += ["--grpo.model_name", "tiny"]
    if path.stem == "gsm8k_qwen":  # its model and data may be out of reach
        for name in ("train", "test"):
            rows = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(300)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        arguments += ["--grpo.model_name", "tiny", "--task.path", tmp_path]
    script(*arguments)
    said = " ".join(capsys.readouterr().out.split())
    counts = {"smoke": 4, "modes": 12, "thresholds": 60, "rules": 135, "study": 35, "explore": 24, "gsm8k_qwen": 9}
    counts |= {
        "start": 20,
        "study_e0": 100,
        "study_e1": 150,
        "study_e2": 130,
        "study_e2b": 105,
        "study_e2b_kl": 18,
        "study_e3": 50,
    }
    counts |= {"study_e4": 9, "smollm2_addition": 3, "smollm2_gym": 3, "oversample": 36, "rivals": 48, "stream": 30}
    dropped = {"thresholds": 36, "study_e3": 30}
    assert f"{counts[path.stem]} trials, 0 of them finished or refused" in said
    assert "reserves [" in said
    assert "dropped 6 (staleness.kl_fresh=0.3, staleness.kl_stale=0.1, " in said or path.stem != "thresholds"
    assert f"; {dropped.get(path.stem, 0)} points dropped" in said
    assert not (tmp_path / "s").exists()


def test_a_dry_run_refuses_what_a_run_would(tmp_path):
    with pytest.raises(ConfigError, match=r"grpo.model_name = './none': cannot be loaded"):
        script(SMOKE, "--dir", tmp_path / "s", "--grpo.model_name", "./none", "--dry-run")


# ---- the smoke sweep: one run of it, three questions ----


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """What it says, and its folder. From nothing: the built-in model is made here too."""
    folder = tmp_path_factory.mktemp("smoke")
    return call(SMOKE, "--dir", folder / "s", OVERLAPRL_CACHE=str(folder / "cache")), folder / "s"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_smoke_sweep(smoke):
    out, folder = smoke
    assert "[4/4] finished" in out
    assert "final" in out
    trials = trials_of(folder)
    assert len(trials) == 4
    assert set(trials["status"]) == {"done"}
    for name in ("trials.parquet", "history.parquet", "report.md", "sweep.yaml"):
        assert (folder / name).stat().st_size > 0
    (state,) = (folder / "tune").glob("*/experiment_state-*.json")
    statuses = [json.loads(trial)["status"] for trial, _ in json.loads(state.read_text())["trial_data"]]
    assert statuses == 4 * ["TERMINATED"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_trial_is_the_run_of_the_training_script(smoke, tmp_path):
    """`scripts/train.py --config` on a trial's own file, another process and another Ray: the same, bit for bit."""
    trials = trials_of(smoke[1])
    trial = smoke[1] / "trials" / trials.index[trials["mode"] == "overlap"][0]
    train = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(trial / "config.yaml")]
    subprocess.run([*train, "--output.dir", str(tmp_path / "alone")], check=True, env=environment(), timeout=1500)
    same_rows(trial, tmp_path / "alone")


PLACEMENTS = """
import json, ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False)
best, deadline = {}, time.time() + 300
while time.time() < deadline and len({n for nodes in best.values() for n in nodes}) < 2:
    groups = ray.util.placement_group_table()
    now = {key: sorted(set(g["bundles_to_node_id"].values())) for key, g in groups.items() if g["state"] == "CREATED"}
    best = max(best, now, key=len)
    time.sleep(0.2)
print(json.dumps(best))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_nodes_give_the_tables_of_one(smoke, tmp_path):
    """A trial's three actors share one node's (simulated) GPU; two trials run on two nodes; the same tables."""
    from ray.cluster_utils import Cluster

    shares = ["--resources.generator_gpu", 0.3, "--resources.reference_gpu", 0.3, "--resources.learner_gpu", 0.3]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    try:
        cluster.add_node(num_cpus=2, num_gpus=1)
        watch = subprocess.Popen(
            [sys.executable, "-c", PLACEMENTS, cluster.address], stdout=subprocess.PIPE, text=True, env=environment()
        )
        out = call(SMOKE, "--dir", tmp_path / "two", *shares, RAY_ADDRESS=cluster.address)
        placed = json.loads(watch.communicate(timeout=300)[0].splitlines()[-1])
        dry = call(SMOKE, "--dir", tmp_path / "dry", "--dry-run", *shares, RAY_ADDRESS=cluster.address)
    finally:
        cluster.shutdown()
    assert "[4/4] finished" in out
    assert "on 2 CPU, 1 GPU; 2 CPU, 1 GPU" in dry
    assert all(len(nodes) == 1 for nodes in placed.values()), placed
    assert len({nodes[0] for nodes in placed.values()}) == 2, placed
    for one, other in zip(tables(smoke[1]), tables(tmp_path / "two"), strict=True):
        gpu = [name for name in one.columns if name.endswith("_gpu")]
        pd.testing.assert_frame_equal(one.drop(columns=gpu), other.drop(columns=gpu))


# ---- cut short ----


def slow_digits(prompts, completions, answer, **columns):
    """The share of digits, told slowly, so that there is a middle to kill a sweep in."""
    time.sleep(0.2)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def slow_sweep(folder: Path) -> Path:
    base = {**BASE, "resources": {}}
    base = merged(base, task={"rewards": ["test_sweep_script:slow_digits"]}, pipeline={"mode": "sync"},
                  grpo={"num_steps": 15}, output={"checkpoint_every": 3})  # fmt: skip
    path = folder / "slow.yaml"
    tune = {"max_concurrent": 2}
    path.write_text(yaml.safe_dump({"base": base, "search": {"seed": {"grid": [0, 1, 2]}}, "tune": tune}))
    return path


def kill_tree(pid: int) -> None:
    """SIGKILL for a driver and everything that Ray started for it, until nothing of it is left."""
    driver = psutil.Process(pid)
    doomed = [driver, *driver.children(recursive=True)]
    assert any("raylet" in process.name() for process in doomed)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(doomed, timeout=60)
    assert not [process for process in alive if process.pid != pid]


def tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Trials and history, without what may differ between equal runs."""
    trials = trials_of(folder)
    timed = ("environment.", "wall_s", "steps_per_s", "stages_s.", "serial", "bound", "overlap_fraction", "thrown_away",
             "memory", "source")  # fmt: skip
    trials = trials[[name for name in trials.columns if not name.startswith(timed) and name != "seconds_to_target"]]
    history = pd.read_parquet(folder / "history.parquet")
    history = history[[name for name in history.columns if not is_time_field(name)]]
    return trials, history.sort_values(["trial", "step"]).reset_index(drop=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sweep_killed_in_its_middle_is_completed_by_the_same_command(tmp_path):
    path, folder = slow_sweep(tmp_path), tmp_path / "s"
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(command(path, "--dir", folder), stdout=log, stderr=log, env=environment())

    def state() -> tuple[list[Path], list[Path]]:
        trials = list((folder / "trials").glob("*"))
        done = [trial for trial in trials if (trial / "summary.json").exists()]
        under_way = [trial for trial in trials if trial not in done and list(trial.glob("checkpoints/step-*"))]
        return done, under_way

    deadline = time.monotonic() + 1500
    while not all(state()) and time.monotonic() < deadline:
        assert first.poll() is None, (tmp_path / "first.log").read_text()
        time.sleep(0.1)
    done, under_way = state()
    assert done
    assert under_way
    kill_tree(first.pid)
    first.wait()
    done, under_way = state()
    before = {file: file.stat().st_mtime_ns for trial in done for file in trial.iterdir() if file.is_file()}

    out = call(path, "--dir", folder)
    assert f"{len(done)} finished before" in out
    assert out.count("] started ") == 3 - len(done)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    for trial in under_way:
        (step,) = map(int, resumed_after(trial))
        assert step >= 3
        assert step % 3 == 0
    call(path, "--dir", tmp_path / "undisturbed")
    trials, history = tables(folder)
    other_trials, other_history = tables(tmp_path / "undisturbed")
    assert history.groupby("trial")["step"].apply(list).tolist() == 3 * [list(range(1, 16))]
    pd.testing.assert_frame_equal(history, other_history)
    pd.testing.assert_frame_equal(trials, other_trials)
    for trial in (folder / "trials").iterdir():
        same_rows(trial, tmp_path / "undisturbed" / "trials" / trial.name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_says_how_to_go_on(tmp_path, number):
    path, folder = slow_sweep(tmp_path), tmp_path / "s"
    running = subprocess.Popen(
        command(path, "--dir", folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    deadline = time.monotonic() + 1000
    while not list(folder.glob("trials/*/checkpoints/step-3")) and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(number)
    out, _ = running.communicate(timeout=600)
    assert running.returncode == 1
    assert "trials are not finished; the same command resumes them" in out
    assert "Traceback" not in out
    trials = trials_of(folder)
    assert set(trials["status"]) <= {"interrupted", "done", "running"}
    assert "interrupted" in set(trials["status"])
