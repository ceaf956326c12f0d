"""What a run is: its hash leaves out defaults and holds the algorithm's number; others' runs are refused."""

import json
from typing import Any

import pytest
from conftest import small
from pydantic import Field, create_model

from overlaprl_ray.config import ExperimentConfig, PipelineConfig, identity
from overlaprl_ray.config.identity import check_run, config_hash, differences
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runtime.recording import finished_summary
from overlaprl_ray.runtime.serial import train_serially
from overlaprl_ray.tune.plan import check_trials, plan_trials
from overlaprl_ray.tune.spec import load_sweep


def config(**groups: Any) -> ExperimentConfig:
    return ExperimentConfig(**groups)


def test_a_setting_given_at_its_default_is_not_given():
    assert config_hash(config()) == config_hash(config(pipeline={"lag": 1}, grpo={"lr": 4e-4}))
    assert config_hash(config(grpo={"model_name": "m"})) == config_hash(config(grpo={"model_name": "m", "lr": 1e-5}))
    assert config_hash(config(grpo={"model_name": "m"})) != config_hash(config(grpo={"model_name": "m", "lr": 4e-4}))
    no_part = config(output={"dir": "x", "eval_every": 3}, pipeline={"timeout_s": 5.0})
    assert config_hash(no_part) == config_hash(config())
    assert len({config_hash(c) for c in (config(), config(seed=1), config(pipeline={"lag": 3}))}) == 3
    assert len(config_hash(config())) == 12


def test_a_setting_added_later_renames_no_run(monkeypatch):
    settings = {"pipeline": {"lag": 4}, "grpo": {"lr": 1e-3}}
    before = config_hash(config(**settings))
    wider = create_model("Pipeline", __base__=PipelineConfig, new_setting=(int, Field(7)))
    later = create_model("Experiment", __base__=ExperimentConfig, pipeline=(wider, wider()))
    monkeypatch.setattr(identity, "ExperimentConfig", later)
    assert config_hash(later(**settings)) == before
    assert config_hash(later(**{**settings, "pipeline": {"lag": 4, "new_setting": 8}})) != before


def test_another_algorithm_is_another_run(monkeypatch):
    before = config_hash(config())
    monkeypatch.setattr(identity, "ALGORITHM", identity.ALGORITHM + 1)
    assert config_hash(config()) != before


@pytest.mark.parametrize(("schedule", "free"), [("constant", True), ("linear", False), ("cosine", False)])
def test_the_number_of_steps_may_change_unless_the_rate_depends_on_it(schedule, free):
    saved = config(grpo={"lr_schedule": schedule, "num_steps": 10}).model_dump(mode="json")
    changed = differences(saved, config(grpo={"lr_schedule": schedule, "num_steps": 20}))
    assert changed == ([] if free else ["grpo.num_steps: 10 -> 20"])


def test_settings_that_are_gone_or_new_are_told():
    saved = config().model_dump(mode="json")
    del saved["model"]["lora_r"]  # saved before there was such a setting
    assert differences(saved, config()) == []
    assert differences(saved, config(model={"lora_r": 4})) == ["model.lora_r: 0 -> 4"]
    saved["grpo"]["top_p"] = 1.0
    assert differences(saved, config(output={"dir": "x"})) == ["grpo.top_p: 1.0 -> unset"]


@pytest.mark.parametrize("number", [1, None])
def test_runs_and_trials_of_another_algorithm_are_refused_in_one_line(tmp_path, number):
    folder = tmp_path / "trials" / "old"
    run = small(grpo={"num_steps": 1}, output={"dir": str(folder), "tensorboard": False})
    train_serially(run)
    check_run(folder)
    assert finished_summary(folder, run)["status"] == "done"
    place = folder / "environment.json"
    environment = json.loads(place.read_text())
    assert environment.pop("algorithm") == identity.ALGORITHM
    place.write_text(json.dumps(environment | ({"algorithm": number} if number else {})))
    said = f"algorithm {number or 'without a number'}, this version has algorithm {identity.ALGORITHM}"
    with pytest.raises(ConfigError, match=said):
        finished_summary(folder, run)
    (tmp_path / "sweep.yaml").write_text("search:\n  seed: {grid: [0, 1]}\n")
    with pytest.raises(ConfigError, match=said) as error:
        check_trials(plan_trials(load_sweep(tmp_path / "sweep.yaml"), tmp_path).trials)
    assert "\n" not in str(error.value)
