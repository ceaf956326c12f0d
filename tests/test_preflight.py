"""What can be wrong before a run starts: each is one `ConfigError`, with Ray not started and nothing written."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml
from rich.console import Console
from transformers import (
    AutoTokenizer,
    BartConfig,
    BertConfig,
    CohereConfig,
    DeepseekV4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4Config,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerBase,
    Qwen3NextConfig,
    RobertaConfig,
    RwkvConfig,
)

from overlaprl_ray.config import TinyConfig
from overlaprl_ray.config.cli import build_config, merge
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.architecture import check_cache, check_logits
from overlaprl_ray.models.loading import load_model, load_tokenizer
from overlaprl_ray.models.tiny import tiny_config, tiny_tokenizer
from overlaprl_ray.runtime import inputs, preflight
from overlaprl_ray.runtime import train as running


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    LlamaForCausalLM(tiny_config(TinyConfig(layers=1, hidden=8, heads=1))).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in an empty folder with an empty cache, and sees to it that both stay so and that Ray is not started."""
    ran_already = ray.is_initialized()
    cwd, cache = tmp_path / "cwd", tmp_path / "cache"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("OVERLAPRL_CACHE", str(cache))
    monkeypatch.setattr(running.Actors, "start", lambda self: pytest.fail("actors started"))
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray started"))
    yield
    assert ray.is_initialized() == ran_already
    assert not cache.exists()
    assert [p for p in cwd.rglob("*") if p.name not in ("mine", "keep.txt")] == []


def refusal(settings: dict[str, Any]) -> str:
    """The message with which settings by dotted name are refused."""
    with pytest.raises(ConfigError) as error:
        checked(settings)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value).strip()
    return str(error.value)


def checked(settings: dict[str, Any]) -> preflight.Preflight:
    """What the checks find out about settings that pass them."""
    return preflight.preflight(build_config(merge({}, settings)))


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def change(folder: Path, name: str, **values: Any) -> None:
    """Set entries of a JSON file of a model."""
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(20)]


def test_a_launch_that_is_refused_starts_and_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        running.train(build_config({"task": {"rewards": ["no_such_module:reward"]}}))


# ---------------------------------------------------------------------------------------------------------------------
# Models


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def no_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def weights_cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


def shard_lost(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def bin_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def foreign_code(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (folder / "own.py").write_text("raise SystemExit('foreign code was run')")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def no_eos(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=None)
    change(folder, "tokenizer_config.json", eos_token=None)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "there is no such folder"),
        (no_files, "config.json is missing"),
        (no_folder, "there is no such folder"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (bin_only, "model.safetensors is missing"),
        (weights_cut, "model.safetensors is damaged"),
        (write("model.safetensors", b""), "model.safetensors is damaged"),
        (shard_lost, "model-00002-of-00002.safetensors is missing"),
        (write("config.json", b"{"), "cannot be loaded (Expecting"),
        (write("config.json", b""), "cannot be loaded (Expecting"),
        (write("config.json", b"[]"), "config.json names no model_type"),
        (write("config.json", b"{}"), "config.json names no model_type"),
        (write("config.json", b'{"model_type": "nothing-like-it"}'), "nothing-like-it"),
        (write("config.json", b'{"model_type": "llama", "hidden_size": "wide"}'), "cannot be loaded"),
        (foreign_code, "cannot be loaded"),
        (write("tokenizer.json", b"{"), "no tokenizer"),
        (no_tokenizer, "no tokenizer"),
        (no_eos, "EOS"),
    ],
)
def test_broken_model_folders(model: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(model)
    message = refusal({"grpo.model_name": str(model)})
    assert message.startswith("grpo.model_name")
    assert said in message
    if said != "EOS":
        assert str(model) in message
        assert "give 'tiny', a folder" in message or "save one beside the model" in message


def quantised(method: str) -> Any:
    config = tiny_config(TinyConfig())
    config.quantization_config = {"quant_method": method, "bits": 4}
    return config


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        (BertConfig(), "a bert has an encoder"),
        (RobertaConfig(), "a roberta has an encoder"),
        (BertConfig(is_decoder=True), "a bert has an encoder"),  # its output head is not linear, either
        (BartConfig(), "a bart has an encoder"),
        (Gemma3Config(), "a gemma3 has parts beside its language model"),
        (Llama4Config(), "a llama4 has parts beside its language model"),
        (quantised("bitsandbytes"), "its weights are quantised (bitsandbytes) and cannot be trained"),
        (quantised("gptq"), "its weights are quantised (gptq) and cannot be trained"),
        (quantised("fp8"), "its weights are quantised (fp8) and cannot be trained"),
        (Gemma2Config(), "a gemma2 with final_logit_softcapping = 30.0"),
        (GraniteConfig(logits_scaling=8.0), "a granite with logits_scaling = 8.0"),
        (CohereConfig(), "a cohere with logit_scale = 0.0625"),
    ],
)
@pytest.mark.parametrize("field", ["grpo.model_name", "model.reference"])
def test_models_that_are_not_plain_language_models(model: Path, field: str, architecture: Any, said: str) -> None:
    architecture.save_pretrained(model)
    message = refusal({field: str(model)})
    assert message.startswith(f"{field} = '{model}': {said}")
    assert "; give " in message


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        (Qwen3NextConfig(), "its LinearAttentionLayer keeps more"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "its LinearAttentionLayer"),
        (FalconH1Config(), "its LinearAttentionAndFullAttentionLayer keeps more"),
        (DeepseekV4Config(), "its DeepseekV4HCACache keeps more"),
        (RwkvConfig(), "RwkvForCausalLM takes none"),
    ],
)
def test_a_cache_that_rows_cannot_be_dropped_from(model: Path, architecture: Any, said: str) -> None:
    architecture.save_pretrained(model)
    message = refusal({"grpo.model_name": str(model)})
    assert message.startswith(f"grpo.model_name = '{model}': rows of a {architecture.model_type} cannot be dropped")
    assert said in message
    assert message.endswith("give a model with attention in every layer")


@pytest.mark.parametrize(
    "architecture",
    [GraniteConfig(), CohereConfig(logit_scale=1.0), Gemma2Config(final_logit_softcapping=None), Gemma3TextConfig()],
)
def test_caps_and_factors_that_are_off_pass(architecture: Any) -> None:
    check_logits(architecture, "some/model", "grpo.model_name")


@pytest.mark.parametrize("architecture", [MistralConfig(sliding_window=8), Gemma3TextConfig(), GptOssConfig()])
def test_sliding_windows_pass(architecture: Any) -> None:
    check_cache(architecture, "some/model")


def test_a_whole_model_folder_passes_and_loads(model: Path) -> None:
    checked({"grpo.model_name": str(model), "grpo.max_new_tokens": 8})
    assert load_model(str(model)).config.vocab_size == len(load_tokenizer(str(model)))


@pytest.mark.parametrize("eos", [1, [1, 2]])
def test_a_tokenizer_without_pad_and_eos_pads_with_the_models_eos(model: Path, eos: int | list[int]) -> None:
    change(model, "tokenizer_config.json", pad_token=None, eos_token=None)
    change(model, "config.json", eos_token_id=eos)
    checked({"grpo.model_name": str(model), "grpo.max_new_tokens": 8})
    assert load_tokenizer(str(model)).pad_token_id == 1


@pytest.mark.parametrize("eos", [None, 10**6])
def test_nothing_to_pad_with(model: Path, eos: int | None) -> None:
    change(model, "tokenizer_config.json", pad_token=None, eos_token=None)
    change(model, "config.json", eos_token_id=eos)
    message = refusal({"grpo.model_name": str(model)})
    assert message.startswith(f"grpo.model_name = '{model}': its tokenizer has no pad token")
    assert message.endswith("set pad_token in its tokenizer_config.json")


def one_more(**special: str) -> Callable[[PreTrainedTokenizerBase], Any]:
    """Adds a token that the model has no embedding for."""
    return lambda tokenizer: tokenizer.add_special_tokens(special) if special else tokenizer.add_tokens(["What"])


@pytest.mark.parametrize(
    ("add", "embeddings", "said"),
    [
        (one_more(), 99, "{data}, line "),
        (one_more(pad_token="[PAD]"), 99, "its pad token '[PAD]' has the id 99, but the model embeds 99 tokens"),
        (one_more(), 90, "{data}, line "),  # a smaller model
        (one_more(eos_token="<|im_end|>"), 99, "the ids of its EOS tokens, [99], are beyond the model's 99"),
    ],
)
def test_tokens_that_the_model_does_not_embed(
    model: Path, tmp_path: Path, add: Any, embeddings: int, said: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    add(tokenizer)
    tokenizer.save_pretrained(model)
    change(model, "config.json", vocab_size=embeddings, eos_token_id=None)
    settings = {"task.name": "records", "task.path": jsonl(tmp_path, *ROWS), "grpo.model_name": str(model)}
    message = refusal({**settings, "grpo.max_new_tokens": 8})
    assert message.startswith(f"grpo.model_name = '{model}': {said.format(data=tmp_path / 'data.jsonl')}")
    assert "; give the tokenizer" in message or "; set " in message


@pytest.mark.parametrize(
    ("template", "system", "blamed", "reason"),
    [
        (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x",
            "Be brief.",
            "task.system_prompt = 'Be brief.': the chat template",
            "refuses it (TemplateError: no system role); set",
        ),
        ("{% for m in messages %}{{ m['content'] }}", None, "its chat template fails", "(TemplateSyntaxError: "),
        ("{{ messages[0]['content'] | nowhere }}", "Hm", "its chat template fails", "(TemplateAssertionError: "),
        ("{{ messages[0]['content'] + 1 }}", None, "its chat template fails", "(TypeError: "),
        ("{{ messages[5]['content'] }}", None, "its chat template fails for prompt 'What is ", "(UndefinedError: "),
    ],
)
def test_chat_templates_that_raise(
    model: Path, tmp_path: Path, template: str, system: str | None, blamed: str, reason: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    settings = {"task.name": "records", "task.path": jsonl(tmp_path, *ROWS), "grpo.model_name": str(model)}
    message = refusal({**settings, "task.system_prompt": system, "grpo.max_new_tokens": 8})
    assert message.removeprefix(f"grpo.model_name = '{model}': ").startswith(blamed)
    assert reason in message


def test_sharded_weights_pass(model: Path) -> None:
    LlamaForCausalLM.from_pretrained(model).save_pretrained(model, max_shard_size="2KB")
    (model / "model.safetensors").unlink(missing_ok=True)
    assert len(list(model.glob("model-*.safetensors"))) > 1
    inputs.check_model_files(str(model), "grpo.model_name")


def test_a_broken_reference_is_blamed_on_its_own_setting(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert refusal({"model.reference": str(model)}).startswith(f"model.reference = '{model}'")
    checked({"model.reference": str(model), "grpo.beta": 0.0})  # none is needed


def test_a_reference_with_another_vocabulary(model: Path) -> None:
    change(model, "config.json", vocab_size=200)
    message = refusal({"model.reference": str(model)})
    assert message.startswith("model.reference")
    assert "200 tokens against 99" in message


@pytest.mark.parametrize("name", ["no-such-model", "no/such", "a/b/c", "what ever", "x" * 5000, "~nobody-at-all/x"])
def test_a_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal({"grpo.model_name": name})
    assert message.startswith(f"grpo.model_name = '{name}': cannot be loaded")
    assert "give 'tiny', a folder" in message


def test_an_unreachable_hub_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_route(*names: str, **_: Any) -> bool:
        asked.extend(names)
        raise OSError("no route")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.file_exists", no_route)
    for _ in range(2):
        assert "cannot be loaded" in refusal({"grpo.model_name": "no/such"})
    assert asked == ["no/such", "config.json"]
    assert os.environ.pop("HF_HUB_OFFLINE") == "1"


def test_a_cached_hub_model_needs_no_hub(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    held = {"config.json"}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file, **_: str(saved / file) if file in held else None
    )
    with pytest.raises(ConfigError, match=r"no \*\.safetensors weights"):
        inputs.check_model_files("some/model", "grpo.model_name")
    held.add("model.safetensors.index.json")
    inputs.check_model_files("some/model", "grpo.model_name")


# ---------------------------------------------------------------------------------------------------------------------
# Tasks, rewards, lengths


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        (None, {}, ["task.path", "no file"]),
        ([], {}, ["task.path", "no rows"]),
        ([*ROWS[:2], "{oops"], {}, ["task.path", "line 3", "is not JSON"]),
        ([[1, 2]], {}, ["task.path", "item 1", "named columns"]),
        (ROWS, {"task.answer_column": "solution"}, ["task.answer_column", "'solution'", "question, answer"]),
        ([{"q": "x", "answer": "1"}] * 5, {}, ["task.question_column", "one of q, answer"]),
        ([{"question": "x", "answer": None}] * 5, {}, ["task.answer_column", "is None", "a text or a number"]),
        (ROWS, {"task.prompt_template": "{nope}"}, ["task.prompt_template", "'{nope}'", "{question}, {answer}"]),
        (ROWS, {"task.prompt_template": "{question"}, ["task.prompt_template", "double any brace"]),
        (ROWS[:1], {}, ["task.path", "one row"]),
        (ROWS, {"task.eval_path": "none.jsonl"}, ["task.eval_path", "none.jsonl"]),
    ],
)
def test_bad_data(tmp_path: Path, rows: list[Any] | None, settings: dict[str, Any], said: list[str]) -> None:
    path = str(tmp_path / "none.jsonl") if rows is None else jsonl(tmp_path, *rows)
    message = refusal({"task.name": "records", "task.path": path, **settings})
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task.name": "records"}, ["task.path: nothing given"]),
        ({"task.eval_size": 9000}, ["task.eval_size: 9000", "make it smaller"]),
        ({"task.prompt_template": "{c}"}, ["task.prompt_template", "{a}, {b}"]),
        ({"task.system_prompt": "Think."}, ["task.system_prompt = 'Think.': 'tiny' would not see it", "null"]),
        ({"task.rewards": ["exact_mach"]}, ["task.rewards: 'exact_mach'", "did you mean 'exact_match'?"]),
        ({"task.rewards": ["no_such_module:reward"]}, ["'no_such_module:reward' cannot be imported", "PYTHONPATH"]),
        ({"task.rewards": ["json:lods"]}, ["json has no function 'lods'", "did you mean 'loads'?"]),
        ({"task.rewards": ["math", "math"], "task.reward_weights": [1, 2]}, ["'math' is there twice"]),
        ({"grpo.max_new_tokens": 510}, ["grpo.max_new_tokens = 510", "6 tokens", "window of 512", "lower it"]),
        (
            {"task.prompt_template": "x" * 600 + "{a}"},
            ["has 602 tokens", "set task.max_prompt_tokens to 507"],
        ),
    ],
)
def test_bad_tasks_rewards_and_lengths(settings: dict[str, Any], said: list[str]) -> None:
    message = refusal(settings)
    assert all(part in message for part in said), message


def shout(prompts: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(prompts)


class Judge:
    def __call__(self, prompts: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(prompts)


@pytest.mark.parametrize(
    ("rewards", "name"),
    [([shout], "shout"), (shout, "shout"), (["math", Judge()], "reward"), ([lambda **_: [1]], "lambda")],
)
def test_a_function_in_place_of_its_name(rewards: Any, name: str) -> None:
    message = refusal({"task.rewards": rewards})
    assert message.startswith("config: task.rewards")
    assert f"%%writefile my_rewards.py, and give ['my_rewards:{name}']" in message


@pytest.mark.parametrize("name", ["shout", "no_such", "Judge.mark"])
def test_a_reward_of_the_running_program(name: str) -> None:
    message = refusal({"task.rewards": [f"__main__:{name}"]})
    assert message.startswith(f"task.rewards: '__main__:{name}' is part of the running script or notebook")
    assert message.endswith(f"%%writefile my_rewards.py) and name it my_rewards:{name}")


def test_the_longest_completion_that_fits_passes() -> None:
    checked({"grpo.max_new_tokens": 506})  # a prompt has 6 tokens


LONG = [{"question": "x" * (600 if i in (3, 17) else 40), "answer": "1"} for i in range(20)]


def test_prompts_that_are_too_long_are_counted_named_and_left_out_on_request(tmp_path: Path) -> None:
    data = {"task.name": "records", "task.path": jsonl(tmp_path, *LONG), "task.eval_path": jsonl(tmp_path, *LONG)}
    assert refusal({**data, "grpo.max_new_tokens": 500}).startswith(
        "grpo.max_new_tokens = 500: 40 of 40 prompts do not"
    )
    message = refusal(data)
    for part in (
        "4 of 40 prompts do not fit the model's window of 512 beside it",
        "line 4, {0}, line 18, {0}, line 4, {0}, line 18; the longest has 600 tokens".format(tmp_path / "data.jsonl"),
        "set task.max_prompt_tokens to 507 to leave them out, lower it",
    ):
        assert part in message
    task = checked({**data, "task.max_prompt_tokens": 507}).task
    assert [len(task.train), len(task.heldout)] == [18, 18]
    [notice] = task.notices
    assert notice == "task.max_prompt_tokens = 507 leaves out 2 of 20 problems to train on, 2 of 20 held out"
    assert "39: nothing is left to train on, or held out; raise it" in refusal({**data, "task.max_prompt_tokens": 39})


def test_the_references_window_counts_too(model: Path) -> None:
    change(model, "config.json", max_position_embeddings=10)
    assert "window of 10 " in refusal({"model.reference": str(model)})
    checked({"model.reference": str(model), "grpo.max_new_tokens": 4})


# ---------------------------------------------------------------------------------------------------------------------
# Resources and places


@pytest.mark.parametrize("share", ["generator_gpu", "reference_gpu", "learner_gpu"])
def test_a_gpu_share_without_a_gpu(monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    monkeypatch.setattr(preflight, "available_gpus", lambda: 0.0)
    message = refusal({f"resources.{share}": 0.5})
    assert message.startswith("resources.")
    assert f"{share} = 0.5" in message
    assert "there are 0; set them to 0 or null" in message


def test_more_than_one_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_gpus", lambda: 1.0)
    message = refusal({"resources.generator_gpu": 0.5, "resources.learner_gpu": 0.6})
    assert "1.25 GPU in all, but there are 1; lower the shares" in message


def test_a_folder_of_another_run() -> None:
    Path("mine").mkdir()
    Path("mine/keep.txt").write_text("kept")
    assert refusal({"output.dir": "mine"}) == (
        "output.dir = 'mine': holds another run or other files; give a new folder, or --resume 'mine'"
    )
    assert Path("mine/keep.txt").read_text() == "kept"


@pytest.mark.parametrize("folder", ["keep.txt", "keep.txt/run", "keep.txt/a/b"])
def test_a_folder_below_a_file(folder: str) -> None:
    Path("keep.txt").write_text("kept")
    message = refusal({"output.dir": folder})
    assert message.startswith(f"output.dir = '{folder}'")
    assert "keep.txt' is no folder; give another folder" in message


def test_a_folder_that_cannot_be() -> None:
    assert "is no path" in refusal({"output.dir": "x" * 5000})


@pytest.mark.parametrize(
    ("settings", "place"), [({"output.dir": "a/b"}, "output.dir = 'a/b'"), ({}, "output.dir (null)")]
)
def test_a_place_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, settings: dict, place: str) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))  # root may always
    message = refusal(settings)
    assert message.startswith(place)
    assert message.endswith("cannot be written to; give another folder")


def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("keep.txt").write_text("kept")
    monkeypatch.setenv("OVERLAPRL_CACHE", str(Path("keep.txt").absolute() / "cache"))
    assert "OVERLAPRL_CACHE: " in refusal({})


def test_an_empty_or_new_folder_passes() -> None:
    Path("mine").mkdir()
    for folder in ("mine", "mine/new/run", None):
        inputs.check_output(folder)


def test_dry_run_in_python() -> None:
    out = io.StringIO()
    task = {"question_column": "[bold]x[/bold] :smile: " * 30}
    config = build_config({"seed": 3, "model": {"engine": "hf"}, "task": task})
    ready = preflight.dry_run(config, Console(file=out, soft_wrap=True, width=40))
    printed, _, plan = out.getvalue().partition("# ")
    assert build_config(yaml.safe_load(printed)) == config.with_setting("model.engine", "hf")
    assert f"{len(ready.task.train)} problems to train on" in plan
