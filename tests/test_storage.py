"""Disks that are full or closed, folders of other runs, and what `--resume` refuses."""

import json
import os
import subprocess
import sys

import pytest
import ray
from conftest import small
from drill import TRAIN, assert_same, config_of, oracle, outcome, write_config

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runtime import train as running
from overlaprl_ray.runtime.serial import train_serially
from overlaprl_ray.runtime.train import train


def with_output(config, **output):
    return config.model_copy(update={"output": config.output.model_copy(update=output)})


def script(*arguments, **more):
    command = [sys.executable, str(TRAIN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **more)


def test_a_resumed_run_must_have_the_same_settings(tmp_path):
    folder = tmp_path / "run"
    config = config_of(folder, steps=2)
    train_serially(config)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "failed"}))
    other = config.model_copy(update={"seed": 3})
    with pytest.raises(ConfigError, match=r"other settings \(seed: 0 -> 3\)"):
        train(other, resume=True)
    with pytest.raises(ConfigError, match=r"holds another run.*--resume"):
        train(config)
    (folder / "config.yaml").write_text("grpo: [")
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read"):
        train(config, resume=True)


def test_a_run_that_is_done_is_not_run_again(tmp_path):
    config = config_of(tmp_path / "run", steps=2)
    first = train_serially(config)
    assert train(config, resume=True) == first
    assert train_serially(config) == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


def test_an_unfinished_serial_run_starts_anew_and_ends_the_same(tmp_path):
    config = config_of(tmp_path / "run", steps=5)

    def stop(row):
        if row["step"] == 3:
            raise RunError("enough")

    with pytest.raises(RunError, match="enough"):
        train_serially(config, on_row=stop)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    train_serially(config)
    rows, _, _ = oracle(config)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in found] == [row["reward"] for row in rows]
    assert len(found) == 5


def test_a_run_that_is_extended_equals_the_longer_one(local_ray, tmp_path, capsys):
    """From the checkpoint of its last step, which holds the weights that the next batches are made of."""
    folder = tmp_path / "run"
    for steps in (3, 4, 8):
        config = with_output(config_of(folder, steps=steps), checkpoint_every=50)
        assert train(config, resume=True)["steps"] == steps
    assert_same(outcome(folder), oracle(config))
    shown = capsys.readouterr().out
    assert "resuming after step 4" in shown
    assert "dropped" not in shown


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_folder_too_deep_for_rays_sockets_is_refused(tmp_path, monkeypatch, variable):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session = f"/ray/session_2026-12-01_06-24-04_123456_{os.getpid()}/sockets/plasma_store"
    longest = "/" + "x" * (107 - len(session) - 1)  # Linux's limit
    monkeypatch.setenv(variable, longest)
    running.check_socket_path()
    monkeypatch.setenv(variable, longest + "x")
    with pytest.raises(ConfigError, match=rf"^{variable} = '/x+': its path is 1 bytes too long .*; set {variable} to"):
        train(with_output(small(), dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume", "nowhere"], "config file 'nowhere/config.yaml': No such file"),
        (["--resume", "x", "--config", "y"], "--config cannot be given with it"),
        (["--resume", "x", "--output.dir", "y"], "--output.dir cannot be given with it"),
    ],
)
def test_what_resume_is_given_is_checked_first(tmp_path, arguments, expected):
    done = script(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of three megabytes: room for one checkpoint of the tiny model, not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let tests mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@needs_root
@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_the_last_good_checkpoint_resumes(tmp_path, small_disk):
    folder = small_disk / "run"
    config = config_of(folder, steps=12)
    write_config(tmp_path / "c.yaml", config)
    paths = [str(TRAIN.parents[1]), os.path.dirname(__file__)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = script("--config", tmp_path / "c.yaml", env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "cannot be written" in line
    assert "free some space" in line
    assert "--resume" in line
    assert not list((folder / "checkpoints").glob("*.part"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = script("--resume", folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step" in done.stdout
    assert "resuming after step 0" not in done.stdout
    assert_same(outcome(folder), oracle(config))
