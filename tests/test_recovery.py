"""A killed actor or driver changes nothing: the run ends with the numbers and weights of an undisturbed one."""

import json
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
from drill import (
    AGENTS,
    TITLES,
    assert_same,
    config_of,
    kill_actor,
    launch,
    oracle,
    outcome,
    pids,
    rows_written,
    run_killing,
    wait_until,
    wait_until_gone,
    write_config,
)

from overlaprl_ray.errors import RunError
from overlaprl_ray.runtime.queue import Ticket
from overlaprl_ray.runtime.recovery import Recovery
from overlaprl_ray.runtime.train import train


@pytest.mark.parametrize(
    ("mode", "row", "victims", "generators"),
    [
        pytest.param("overlap", 5, ["generator"], 1, marks=pytest.mark.ci),
        pytest.param("overlap", 5, ["reference"], 1, marks=pytest.mark.ci),
        ("overlap", 5, ["learner"], 1),
        pytest.param("sync", 2, ["generator"], 1, marks=pytest.mark.slow),  # the step whose checkpoint is begun fails
        pytest.param("overlap", 5, ["generator", "reference", "learner"], 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_actor_is_restarted_and_changes_nothing(local_ray, tmp_path, mode, row, victims, generators):
    settings = {"resources": {"num_generators": generators}, "pipeline": {"max_restarts": 4}}
    config = config_of(tmp_path / "run", mode, **settings)
    summary = run_killing(config, {row: victims})
    assert summary["restarts"] == len(victims) + generators - 1
    assert_same(outcome(tmp_path / "run"), oracle(config))


@pytest.mark.ci
def test_under_mps_one_death_restarts_every_actor_and_counts_once(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr("overlaprl_ray.runtime.train.under_mps", lambda: True)
    config, processes = config_of(tmp_path / "run", pipeline={"max_restarts": 1}), []

    def kill_a_generator(row):
        if row["step"] in (5, 12):
            processes.append({pid for title in TITLES.values() for pid in pids(title)})
        if row["step"] == 5:
            kill_actor("generator")

    assert train(config, on_row=kill_a_generator)["restarts"] == 1
    before, after = processes
    assert len(before) == len(after) == 3
    assert not before & after
    assert_same(outcome(tmp_path / "run"), oracle(config))


def test_under_mps_another_actors_error_counts_as_a_death(tmp_path):
    def steps():
        raise RunError("CUDA error")

    pipeline = SimpleNamespace(steps=steps, graph=SimpleNamespace(settle=lambda: None, folder=tmp_path))
    for dead, said in (["generator"], r"CUDA error .pipeline\.max_restarts = 0 is used up"), ([], "CUDA error$"):
        actors = SimpleNamespace(config=config_of("run", pipeline={"max_restarts": 0}), dead=lambda dead=dead: dead)
        with pytest.raises(RunError, match=said):
            list(Recovery(pipeline, actors, print, mps=True).steps())


def test_more_deaths_than_allowed_end_the_run_with_the_command_that_resumes_it(local_ray, tmp_path):
    config = config_of(tmp_path / "run", pipeline={"max_restarts": 1})
    with pytest.raises(RunError, match=r"max_restarts = 1 is used up.*--resume"):
        run_killing(config, {3: ["generator"], 6: ["learner"]})
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.ci
def test_a_killed_driver_is_resumed_exactly_and_leaves_no_process(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    config = config_of(folder)
    write_config(tmp_path / "c.yaml", config)
    process = launch("--config", tmp_path / "c.yaml", log=log)
    wait_until(lambda: process.poll() is not None or rows_written(folder) >= 7, "seven rows")
    assert process.poll() is None, log.read_text()
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(family, 30, but=AGENTS)
    assert launch("--resume", folder, log=log).wait(300) == 0, log.read_text()
    assert_same(outcome(folder), oracle(config))


@pytest.mark.parametrize(("device", "ends"), [("cpu", True), ("cuda", False)])
def test_a_repeated_step_may_give_other_numbers_only_where_the_learner_computes_on_a_gpu(device, ends):
    """The driver is not asked: it may have no GPU, or be the only one to have one."""
    said = []
    learner = SimpleNamespace(device=SimpleNamespace(remote=lambda: device))
    actors = SimpleNamespace(learner=learner, fetch=lambda reference, what: reference)
    now, before = SimpleNamespace(metrics={"loss": 1.0}), SimpleNamespace(metrics={"loss": 1.0 + 1e-7})
    recovery = Recovery(None, actors, said.append)
    if ends:
        with pytest.raises(RunError, match="step 3 gave other numbers"):
            recovery._compare(Ticket(3, 2, calls={"train": now}, result=before))
    else:
        recovery._compare(Ticket(3, 2, calls={"train": now}, result=before))
        assert "not exact" in said[0]
    recovery._compare(Ticket(3, 2, calls={"train": now}, result=now))
    assert len(said) == (not ends)
