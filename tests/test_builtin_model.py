"""The packaged model: what it is, when it is the start of a run, and that nothing is built for it."""

import hashlib
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from overlaprl_ray.config import TaskConfig, TinyConfig
from overlaprl_ray.models import tiny
from overlaprl_ray.tasks import build_task


def test_the_recipe_names_these_weights_and_the_default_shape():
    recipe = json.loads((tiny.BUILTIN / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["sha256"] == hashlib.sha256((tiny.BUILTIN / "model.safetensors").read_bytes()).hexdigest()
    assert recipe["shape and warm start"] == TinyConfig().model_dump()


def test_it_is_an_ordinary_folder_with_the_tokenizer_of_this_version():
    model = AutoModelForCausalLM.from_pretrained(tiny.BUILTIN)
    assert 0.1e6 < sum(p.numel() for p in model.parameters()) < 0.2e6
    expected = tiny.tiny_config(TinyConfig())
    assert {
        k: getattr(model.config, k) for k in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")
    } == {k: getattr(expected, k) for k in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
    saved, made = AutoTokenizer.from_pretrained(tiny.BUILTIN), tiny.tiny_tokenizer()
    text = "12+34=\näöü~"
    assert saved(text)["input_ids"] == made(text)["input_ids"]
    assert (saved.pad_token_id, saved.eos_token_id) == (made.pad_token_id, made.eos_token_id)


@pytest.mark.parametrize(
    ("shape", "task", "packaged"),
    [
        ({}, {}, True),
        ({}, {"eval_size": 16}, True),
        ({}, {"rewards": ["boxed_format"]}, True),
        ({}, {"eval_size": 300}, False),  # some of those held out now were trained on
        ({}, {"digits": 1, "eval_size": 8}, False),
        ({}, {"reverse_answer": False}, False),
        ({}, {"prompt_template": "{a} plus {b} is "}, False),
        ({"layers": 1}, {}, False),
        ({"seed": 1}, {}, False),
    ],
)
def test_packaged_exactly_where_it_fits_and_knows_no_held_out_problem(shape, task, packaged, monkeypatch):
    monkeypatch.setattr(tiny, "_warm_started", lambda config, problems: "built")
    folder = tiny.tiny_folder(TinyConfig(**shape), build_task(TaskConfig(**task)).train)
    assert folder == (tiny.BUILTIN if packaged else "built")
