"""Data, reward code, tokenizer, chat template and the day are part of what a run is."""

import datetime as dt
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import policy_of, read_jsonl, small
from test_replay import untimed
from transformers import AutoModelForCausalLM

from overlaprl_ray.config.cli import load_config
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.loading import load_tokenizer
from overlaprl_ray.runtime import fingerprint
from overlaprl_ray.runtime.actors import LearnerActor
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.serial import train_serially
from overlaprl_ray.tasks import build_task
from overlaprl_ray.tune.plan import check_trials, plan_trials
from overlaprl_ray.tune.spec import load_sweep
from overlaprl_ray.workers.build import build_sampler

TEMPLATE = "{{ strftime_now('%d %b') }}:{% for m in messages %}{{ m['content'] }}{% endfor %}"
REWARD = "def length(prompts, completions, **columns):\n    return [float(len(c) % 3) for c in completions]\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of two steps on a model, data and a reward of one's own."""
    shutil.copytree(policy_of(small(), build_task(small().task)), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10, 40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_length.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_length", raising=False)
    task = {"name": "records", "path": str(tmp_path / "data.jsonl"), "rewards": ["my_length:length"]}
    grpo = {"model_name": str(tmp_path / "model"), "num_steps": 2, "max_new_tokens": 5, "lr": 1e-3, "beta": 0.0}
    return small(grpo=grpo, task=task, pipeline={"mode": "sync"}, output={"dir": str(tmp_path / "run")})


def edit(path, old, new):
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("data.jsonl", ('"20"', '"21"'), "problems"),
        ("data.jsonl", ("10+10=", "10+11="), "problems"),
        ("my_length.py", ("% 3", "% 2"), "code of my_length"),
        ("model/chat_template.jinja", ("messages %}", "messages %} "), "chat template"),
        ("model/tokenizer.json", ('"unk_token": "<unk>"', '"unk_token": "<pad>"'), "tokenizer"),
    ],
)
def test_a_run_is_not_continued_with_other_inputs(config, tmp_path, name, change, said):
    train_serially(config)
    longer = config.with_setting("grpo.num_steps", 3)
    original = (tmp_path / name).read_text()
    edit(tmp_path / name, *change)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(ConfigError) as error:
        train_serially(longer)
    assert str(error.value) == (
        f"output.dir = '{tmp_path}/run': the run there began with other inputs ({said}); restore them, or start a new "
        "run in a new folder"
    )
    assert rows == read_jsonl(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / name).write_text(original)
    importlib.invalidate_caches()
    assert train_serially(longer)["steps"] == 3


def test_a_sweep_names_the_trials_that_were_run_with_other_inputs(config, tmp_path):
    base = config.model_dump(mode="json") | {"output": {"tensorboard": False}}
    sweep = {"base": base, "search": {"seed": {"grid": [0, 1]}}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (tmp_path / "day.txt").write_text("2001-02-03\n")
    first, second = plan_trials(load_sweep(tmp_path / "sweep.yaml"), tmp_path).trials
    assert check_trials([first, second]) == []
    train_serially(first.config)
    assert load_config(first.folder / "config.yaml").task.date == dt.date(2001, 2, 3)
    assert check_trials([first, second]) == []
    edit(tmp_path / "data.jsonl", '"20"', '"21"')
    [line] = check_trials([first, second])
    assert line == f"{first.name} has other inputs (problems); remove its folder to run it anew"


def on(day, monkeypatch):
    class Day(dt.date):
        @classmethod
        def today(cls):
            return cls.fromisoformat(day)

    monkeypatch.setattr(fingerprint, "date", Day)


def test_a_run_has_one_day(config, tmp_path, monkeypatch):
    on("2001-02-03", monkeypatch)
    train_serially(config)
    on("2001-02-04", monkeypatch)
    train_serially(config.with_setting("grpo.num_steps", 3))  # resumed without a checkpoint: from its first step
    folder = tmp_path / "run"
    saved = load_config(folder / "config.yaml")
    assert (saved.task.date, yaml.safe_load((folder / "inputs.yaml").read_text())["task.date"]) == (
        dt.date(2001, 2, 3),
        "2001-02-03",
    )
    rows = untimed(read_jsonl(folder / "metrics.jsonl"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in replay(saved)[0]]
    other, _ = replay(saved.with_setting("task.date", None))
    assert [row["loss"] for row in rows] != [row["loss"] for row in other]
    with pytest.raises(ConfigError, match=r"other inputs \(task.date"):
        train_serially(config.with_setting("task.date", dt.date(2001, 2, 4)).with_setting("grpo.num_steps", 4))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2001"),
        (
            "{% set form = '%A, %-d' %}{% if strftime_now is defined %}{{ strftime_now(form) }}{% endif %}",
            "Saturday, 3",
        ),
        ("{% macro head() %}\n  {{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ head() }}", "  2001-02-03"),
        ("\n  {{ strftime_now('%H:%M %j') }}\n", "\n  00:00 034"),
        ("{{ messages[0]['content'] }}", "x"),
    ],
)
def test_a_chat_template_sees_the_runs_day(config, template, expected):
    folder = Path(config.grpo.model_name)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder), dt.date(2001, 2, 3))
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == expected
    assert load_tokenizer(str(folder)).chat_template == template  # what a run saves


@pytest.mark.parametrize("model", [{}, {"lora_r": 2}])
def test_a_saved_model_stops_where_the_run_did(local_ray, config, tmp_path, model):
    """Its tokenizer's EOS is not the one of its generation settings, which also set what greedy decoding ignores."""
    folder = Path(config.grpo.model_name)
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", '"eos_token": "<eos>"', '"eos_token": "3"')
    settings = {"eos_token_id": 1, "do_sample": False, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = small(
        grpo=config.grpo.model_dump() | {"max_new_tokens": 12},
        model=model,
        task=config.task.model_dump(),
        output={"merge_lora": bool(model)},
    )
    sampler = build_sampler(config, build_task(config.task), str(folder))
    actor = LearnerActor(config, 0.0, str(folder))
    actor.save(tmp_path / "final")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "merged" if model else tmp_path / "final")
    problems, ends = iter(sampler.task.train), {1, sampler.tokenizer.convert_tokens_to_ids("3")}
    stopped = set()
    while stopped != ends:
        ids = sampler.tokenizer(next(problems).prompt)["input_ids"]
        out = sampler.engine.generate([ids], 12, 1.0)
        own = out.ids[0][out.mask[0]].tolist()
        theirs = saved.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert theirs == own
        stopped |= ends & {own[-1]}
