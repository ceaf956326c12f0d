"""Real runs on Ray: who made what, what overlapped, and what happens when something fails."""

import json
import os
import sys
import threading

import pytest
import ray
import torch
from conftest import policy_of, read_jsonl, small

from overlaprl_ray.algorithm.schedule import Schedule
from overlaprl_ray.config.cli import load_config
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.folders import find_models
from overlaprl_ray.runtime.actors import check_simulated
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.repeat import repeat
from overlaprl_ray.runtime.supervisor import Actors
from overlaprl_ray.runtime.train import train
from overlaprl_ray.runtime.weights import publish
from overlaprl_ray.workers.build import build_learner

STALE = {"kl_fresh": 1e-6, "kl_stale": 2e-4}  # low enough that discards occur


def run(folder, **groups):
    """A run's rows and summary, without a reference model: two actors start faster than three."""
    grpo = {"beta": 0.0, **groups.pop("grpo", {})}
    output = {"dir": str(folder), "eval_every": 0, "completions_every": 1, **groups.pop("output", {})}
    summary = train(small(output=output, grpo=grpo, **groups))
    return read_jsonl(folder / "metrics.jsonl"), summary


def weights_steps(folder) -> dict[int, int]:
    """Batch -> the step whose weights generated it, from the run's own record."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    made = [e["args"] for e in events if e.get("name", "").startswith("generate")]
    return {args["batch"]: args["weights_step"] for args in made}


@pytest.mark.parametrize("lag", [pytest.param(1, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.slow), 5])
def test_each_batch_is_made_with_the_planned_weights_and_work_overlaps(local_ray, tmp_path, lag):
    shape = {"num_steps": 30, "lr": 3e-3, "num_prompts_per_step": 16, "group_size": 8}
    rows, summary = run(
        tmp_path / "run",
        grpo=shape,
        pipeline={"mode": "overlap", "lag": lag},
        staleness=STALE,
        output={"eval_every": 10},
    )
    version_after = {0: 0, **{row["step"]: row["version"] for row in rows}}
    assert summary["decisions"]["discard"] > 0
    assert summary["version"] < 30
    planned = {step: Schedule(lag).weights_step(step) for step in range(1, 31)}
    assert weights_steps(tmp_path / "run") == planned
    for step, source in planned.items():
        # the version that the generator's weights carried themselves
        assert rows[step - 1]["staleness/lag"] == version_after[step - 1] - version_after[source]
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "eval.jsonl")] == [0, 10, 20, 30]
    assert summary["overlap_fraction"] >= 0.8


@pytest.mark.ci
def test_latest_uses_fresher_weights_within_the_same_bound(local_ray, tmp_path):
    lag = 3
    task = {"rewards": ["test_pipeline:slow"]}  # the learner is the faster one, so newer weights are to be had
    pipeline = {"mode": "async", "lag": lag, "schedule": "latest"}
    rows, _ = run(tmp_path / "run", grpo={"num_steps": 16}, pipeline=pipeline, task=task)
    assert len(rows) == 16
    assert "memory/reference_gb" not in rows[0]  # no such actor where beta is 0
    made = weights_steps(tmp_path / "run")
    assert all(made[step] >= Schedule(lag).weights_step(step) for step in made)
    assert all(made[step] < step for step in made)
    assert sum(made[step] > Schedule(lag).weights_step(step) for step in range(6, 17)) >= 8
    assert list(made) == list(range(1, 17))
    assert [row["weights_step"] for row in rows] == list(made.values())
    assert "16 steps repeated, every row equal" in repeat(tmp_path / "run")


def test_actors_share_the_gpu_by_fractions_and_leave_nothing_behind(local_ray, monkeypatch):
    """The GPU is simulated: Ray counts one, torch sees none."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # found out after this Ray was started
    config = small()
    ready = preflight(config)
    free = 1.0
    assert wait_for(lambda: ray.available_resources().get("GPU", 0.0), free)  # other tests' actors are gone
    models = find_models(config, ready.task.train)
    started = Actors(config, ready.task, models, ready.plan, run="placement")
    started.start()
    started.wait_ready()
    held = ready.plan.generator_gpu + ready.plan.reference_gpu + ready.plan.learner_gpu
    assert 0.9 <= held <= 1
    assert wait_for(lambda: ray.available_resources().get("GPU", 0.0), free - held)
    for role in ("generator", "reference", "learner"):
        actor = ray.get_actor(f"placement/{role}")
        found, modules = ray.get(actor.__ray_call__.remote(lambda self: (dict(os.environ), set(sys.modules))))
        assert (found["HF_HUB_OFFLINE"], found["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
        assert modules & {"pandas", "matplotlib", "scipy", "datasets", "sklearn"} == set()
    # a second set does not fit beside the first: it says so instead of hanging
    short = config.with_setting("resources.start_timeout_s", 3.0)
    second = Actors(short, ready.task, models, ready.plan, run="second")
    second.start()
    with pytest.raises(RunError, match=r"timed out waiting for .*resources.start_timeout_s"):
        second.wait_ready()
    second.stop()
    started.stop()
    assert wait_for(lambda: ray.available_resources()["GPU"], free)


def test_weights_that_the_object_store_cannot_hold_are_refused_before_actors_start(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(Actors, "start", lambda self: pytest.fail("actors started"))
    store = ray.cluster_resources()["object_store_memory"]
    hidden = 8 * int((store / (64 * 4 * 16 * 3)) ** 0.5 / 8 + 1)  # a layer has 16 hidden^2 floats; 3 of 4 layers do
    large = small(
        model={"tiny": {"layers": 4, "hidden": hidden, "heads": 1}},
        pipeline={"lag": 62},
        output={"dir": str(tmp_path / "run")},
    )
    with pytest.raises(ConfigError, match=r"pipeline.lag = 62: 64 sets of weights take .* GB, but Ray's object store"):
        train(large)
    assert not (tmp_path / "run").exists()


def test_the_size_of_the_weights_is_what_the_learner_publishes():
    config = small()
    found = preflight(config)
    learner = build_learner(config, policy_of(config, found.task))
    assert found.published_bytes == sum(array.nbytes for array in publish(0, learner.weights()).arrays.values())
    assert preflight(config.with_setting("model.dtype", "bfloat16")).published_bytes == found.published_bytes / 2


def test_a_real_gpu_that_torch_cannot_use_ends_the_run():
    check_simulated({"ray.io/node-id": "a"})
    with pytest.raises(RunError, match=r"share of a GPU \(H100\) that torch .* cannot use .*; install a torch"):
        check_simulated({"ray.io/node-id": "a", "ray.io/accelerator-type": "H100"})


def wait_for(value, expected, seconds=20.0):
    """Whether a value of Ray's, which it updates with a delay, becomes the expected one."""
    import time

    deadline = time.monotonic() + seconds
    while abs(value() - expected) > 1e-6 and time.monotonic() < deadline:
        time.sleep(0.1)
    return abs(value() - expected) <= 1e-6


def raises_at_third_batch(prompts, completions, answer, **columns):
    """A user's reward with a fault, called where time limits by signals work."""
    assert threading.current_thread() is threading.main_thread()
    raises_at_third_batch.calls = getattr(raises_at_third_batch, "calls", 0) + 1
    if raises_at_third_batch.calls > 3:  # the first call is the evaluation
        raise KeyError("no such unit")
    return [0.0] * len(completions)


def slow(prompts, completions, answer, **columns):
    """A reward that takes its time."""
    import time

    time.sleep(0.3)
    return [0.0] * len(completions)


def leaves(prompts, completions, answer, **columns):
    """One that would end the program."""
    raise SystemExit("enough")


def kills_its_process(prompts, completions, answer, **columns):
    """The out-of-memory killer's part, at the third batch."""
    import os
    import signal

    kills_its_process.calls = getattr(kills_its_process, "calls", 0) + 1
    if kills_its_process.calls > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(completions)


def stops_at_third_batch(prompts, completions, answer, **columns):
    """An actor that is there and does nothing any more."""
    import os
    import signal

    stops_at_third_batch.calls = getattr(stops_at_third_batch, "calls", 0) + 1
    if stops_at_third_batch.calls > 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [0.0] * len(completions)


def hangs(prompts, completions, answer, **columns):
    """Another."""
    import time

    time.sleep(3600)


@pytest.mark.parametrize(
    ("reward", "expected", "steps"),
    [
        ("raises_at_third_batch", "batch 3: .*no such unit", 2),
        ("hangs", "^evaluation: scoring took more than task.reward_timeout_s = 2 s .first prompt '.*resume with", 0),
        pytest.param("leaves", "SystemExit: enough", 0, marks=pytest.mark.slow),
        ("kills_its_process", "died while waiting for step 3.*max_restarts = 0", 2),
    ],
)
def test_what_fails_ends_the_run_by_name_and_keeps_what_was_done(local_ray, tmp_path, reward, expected, steps):
    task, restarts = {"rewards": [f"test_pipeline:{reward}"], "reward_timeout_s": 2.0}, 3 * (reward == "hangs")
    with pytest.raises(RunError, match=expected):
        run(tmp_path / "run", task=task, pipeline={"mode": "overlap", "lag": 1, "max_restarts": restarts})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] == steps
    assert summary["accuracy_final"] is None


@pytest.mark.ci
@pytest.mark.parametrize("schedule", ["exact", "latest"])
def test_a_call_that_never_ends_is_waited_for_so_long_and_named(local_ray, tmp_path, schedule):
    pipeline = {"mode": "async", "lag": 2, "schedule": schedule, "timeout_s": 15.0}
    with pytest.raises(RunError, match=r"timed out waiting for step 3 .*\(raise pipeline.timeout_s"):
        run(tmp_path / "run", task={"rewards": ["test_pipeline:stops_at_third_batch"]}, pipeline=pipeline)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_the_final_model_is_an_ordinary_folder_that_training_goes_on_from(local_ray, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(tmp_path / "first")
    folder = str(tmp_path / "first" / "final")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    out = model.generate(torch.tensor([tokenizer("12+34=")["input_ids"]]), max_new_tokens=5)
    assert isinstance(tokenizer.decode(out[0], skip_special_tokens=True), str)
    settings = load_config(tmp_path / "first" / "config.yaml", {"grpo.model_name": folder})
    groups = settings.model_dump()
    del groups["output"]["dir"]
    rows, summary = run(tmp_path / "second", **groups)
    assert summary["status"] == "done"
    assert len(rows) == 4
    assert settings.grpo.max_new_tokens == 5
    kept = {path.name for path in (tmp_path / "second").iterdir()}
    assert kept >= {"config.yaml", "metrics.jsonl", "eval.jsonl", "summary.json", "completions.jsonl", "timeline.json"}
    assert kept >= {"environment.json", "timeline.png", "final"}
