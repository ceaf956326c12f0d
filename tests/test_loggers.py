"""TensorBoard events and Weights & Biases: the numbers of metrics.jsonl, read back by their own readers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import read_jsonl, small

from overlaprl_ray.config.identity import config_hash
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.loggers import TAG_PREFIX, RunLoggers, check_loggers, numbers, tensorboard
from overlaprl_ray.runtime.train import train
from overlaprl_ray.workers.results import Evaluation


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, as TensorBoard itself reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def expected(folder: Path) -> dict[str, dict[int, float]]:
    """The same, from the run's own files."""
    rows = read_jsonl(folder / "metrics.jsonl")
    tags: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in numbers(row).items():
            tags.setdefault(TAG_PREFIX + name.replace(":", "_"), {})[row["step"]] = value
    tags[TAG_PREFIX + "eval/accuracy"] = {r["step"]: r["accuracy"] for r in read_jsonl(folder / "eval.jsonl")}
    return tags


def test_tensorboard_reads_the_numbers_of_a_run(local_ray, tmp_path):
    train(small(grpo={"beta": 0.0}, output={"dir": str(tmp_path / "run"), "eval_every": 2}))
    found, wanted = events(tmp_path / "run"), expected(tmp_path / "run")
    assert found.keys() == wanted.keys()
    assert "ray/tune/staleness/kl" in found
    assert "ray/tune/rewards/dense_reward_digits/mean" in found
    for tag, values in wanted.items():
        assert found[tag] == pytest.approx(values), tag


@pytest.mark.slow
def test_a_sweep_of_ten_trials_has_the_same_tags_and_a_short_clean_log(cache, tmp_path):
    """What TensorBoard reads of each trial, from Ray Tune's events; and `sweep.py > log.txt 2>&1`."""
    root = Path(__file__).parents[1]
    settings = small(grpo={"num_steps": 3, "beta": 0.0}).model_dump(mode="json")
    settings.pop("seed")
    sweep = {"base": settings, "search": {"seed": {"grid": list(range(10))}}, "tune": {"serial": True}}
    (tmp_path / "ten.yaml").write_text(yaml.safe_dump(sweep))
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": "local"}
    with (tmp_path / "log.txt").open("w") as log:
        command = [sys.executable, str(root / "scripts" / "sweep.py"), str(tmp_path / "ten.yaml"), "--dir", "ten"]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment, check=True)
    text = (tmp_path / "log.txt").read_text()
    assert len(text.splitlines()) < 60
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), "control codes"
    assert "Ray dashboard: http://127.0.0.1:" in text
    trials = sorted((tmp_path / "ten" / "trials").iterdir())
    assert len(trials) == 10
    for trial in trials:
        (tune,) = (tmp_path / "ten" / "tune").glob(f"*/{trial.name}-*")
        found, wanted = events(tune), expected(trial)
        del wanted[TAG_PREFIX + "eval/accuracy"]  # there, with the newest value so far, at every step
        assert found[TAG_PREFIX + "eval/accuracy"].keys() >= {1, 2, 3}
        for tag, values in wanted.items():
            # after the last step Tune is told of it once more, with the accuracy at the end
            assert {step: found[tag][step] for step in values} == pytest.approx(values), tag
        assert not list(trial.glob("events*"))


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path):
    first = tensorboard(tmp_path)
    for step in (1, 2, 3, 4):
        first.write({"step": step, "reward": float(step), "loss": None, "staleness/decision": "fresh"}, step)
    first.close()
    second = tensorboard(tmp_path, before={"step": 2})
    for step in (3, 4, 5):
        second.write({"step": step, "reward": 10.0 * step}, step)
    second.close()
    assert events(tmp_path)["ray/tune/reward"] == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0, 5: 50.0}


@pytest.mark.slow
def test_tensorboard_reads_a_resumed_run_as_its_files_have_it(local_ray, tmp_path):
    """Cut short at its sixth step, resumed after the checkpoint of its fourth."""
    config = small(
        grpo={"beta": 0.0, "num_steps": 8},
        output={"dir": str(tmp_path / "run"), "checkpoint_every": 4, "eval_every": 2},
    )

    def cut(row):
        if row["step"] == 6:
            raise RunError("enough")

    with pytest.raises(RunError, match="enough"):
        train(config, on_row=cut)
    train(config, resume=True)
    found, wanted = events(tmp_path / "run"), expected(tmp_path / "run")
    assert len(list((tmp_path / "run").glob("events.*"))) == 2
    assert found.keys() == wanted.keys()
    for tag, values in wanted.items():
        assert found[tag] == pytest.approx(values), tag


def test_no_events_where_none_are_wanted(tmp_path):
    loggers = RunLoggers(small(output={"tensorboard": False, "dir": str(tmp_path)}), tmp_path)
    loggers.evaluation(Evaluation(0, 0, 0.5, 16, (0.0, 1.0)))
    loggers.close()
    assert list(tmp_path.iterdir()) == []


OFFLINE = """
import sys
from pathlib import Path
from conftest import small
from overlaprl_ray.runs.loggers import RunLoggers, check_loggers
from overlaprl_ray.workers.results import Evaluation

folder = Path(sys.argv[1])
config = small(output={"dir": str(folder), "wandb": "demo", "tensorboard": False})
check_loggers(config)
loggers = RunLoggers(config, folder)
loggers.evaluation(Evaluation(0, 0, 0.25, 16, (0.0, 1.0)))
for step in (1, 2):
    loggers.step({"step": step, "reward": step / 8, "staleness/decision": "fresh", "loss": None})
loggers.close()
"""


def log_records(data: bytes):
    """The records of wandb's file: LevelDB's log format (blocks of 32 KiB, records in parts) after a header of 7."""
    whole, place = b"", 7
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only part, or the last
            yield whole
            whole = b""


@pytest.mark.slow
def test_weights_and_biases_works_without_an_account(tmp_path):
    """In a process of its own, with no key to be found: wandb keeps settings and threads for a process's life."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    name = config_hash(small())
    folder = tmp_path / "sweep" / "trials" / name
    folder.mkdir(parents=True)
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    environment = {**hidden, "HOME": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", OFFLINE, str(folder)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows, run = [], None
    for data in log_records(path.read_bytes()):
        record = protocol.Record.FromString(data)
        run = record.run if record.WhichOneof("record_type") == "run" else run
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    assert (run.project, run.display_name, run.run_group) == ("demo", name, "sweep")
    assert rows[0]["eval/accuracy"] == "0.25"
    assert [(row["step"], row["reward"], row["staleness/decision"]) for row in rows[1:]] == [
        ("1", "0.125", '"fresh"'),
        ("2", "0.25", '"fresh"'),
    ]


def test_asking_for_wandb_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"output.wandb = 'demo': the package wandb is not installed; pip install"):
        check_loggers(small(output={"wandb": "demo"}))
    check_loggers(small())
