"""Command line and YAML: what they accept, and that every mistake is one line and exit code 2."""

import os
import subprocess
import sys
import time
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import fields, load_config, merge, parse_command_line, read_yaml
from overlaprl_ray.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train.py"


def parse(*argv: str) -> ExperimentConfig:
    return parse_command_line("train.py", "about", list(argv))[0]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    message = str(error.value)
    assert "\n" not in message
    return message


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# ---- what is accepted ----


def test_overrides_beat_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, "grpo:\n  lr: 1e-4\n  num_steps: 7\nseed: 3\n")
    config = parse("--config", path, "--grpo.lr", "1e-5", "--seed=4")
    assert (config.grpo.lr, config.grpo.num_steps, config.seed, config.grpo.group_size) == (1e-5, 7, 4, 8)
    assert load_config(path, {"grpo.lr": 1e-5, "seed": 4}) == config


def test_another_model_on_the_command_line_drops_the_settings_for_the_built_in_one(tmp_path: Path) -> None:
    config = parse("--config", written(tmp_path, "seed: 1\n"), "--grpo.model_name", "a/b")
    assert (config.grpo.lr, config.grpo.num_steps, config.grpo.micro_batch_size) == (1e-5, 50, 8)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--grpo.model_name", "a/b", "--grpo.dual_clip", "3", "--task.prompt_template", "x: {a}"],
        ["--task.name", "records", "--task.rewards", "[math, a:b]", "--task.reward_weights", "[1, 0.5]"],
        ["--model.tiny.layers", "1", "--model.reference", "tiny", "--staleness.apply_to", "lr"],
    ],
)
def test_a_written_configuration_loads_to_the_same(tmp_path: Path, argv: list[str]) -> None:
    config = parse(*argv)
    path = written(tmp_path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("task.prompt_template", "{question}", "{question}"),
        ("task.prompt_template", "null", None),
        ("task.system_prompt", "You are: helpful # really", "You are: helpful # really"),
        ("output.dir", "2026-01-01", "2026-01-01"),
        ("grpo.model_name", "12", "12"),
        ("task.rewards", "[math, boxed_format]", ["math", "boxed_format"]),
        ("grpo.lr", "1e-5", 1e-5),
        ("grpo.lr", "1", 1.0),
        ("grpo.num_steps", "10.0", 10),
        ("grpo.dual_clip", "3", 3.0),
        ("grpo.micro_batch_size", "null", None),
        ("grpo.scale_rewards", "false", False),
        ("staleness.rule", "none", "none"),
        ("resources.learner_gpu", "0", 0.0),
    ],
)
def test_values_on_the_command_line(name: str, text: str, value: Any) -> None:
    found = attrgetter(name)(parse(f"--{name}", text))
    assert found == value
    assert type(found) is type(value)


def test_empty_files_and_anchors(tmp_path: Path) -> None:
    for text in ("", "# nothing yet\n"):
        assert parse("--config", written(tmp_path, text)) == parse() == ExperimentConfig()
    config = parse("--config", written(tmp_path, "grpo: {num_steps: &n 7, num_iterations: *n}\n"))
    assert (config.grpo.num_steps, config.grpo.num_iterations) == (7, 7)


def test_merge_changes_neither_argument() -> None:
    values, overrides = {"grpo": {"lr": 1}}, {"grpo.lr": 2, "model.tiny.layers": 3}
    assert merge(values, overrides) == {"grpo": {"lr": 2}, "model": {"tiny": {"layers": 3}}}
    assert (values, overrides) == ({"grpo": {"lr": 1}}, {"grpo.lr": 2, "model.tiny.layers": 3})


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    text = capsys.readouterr().out
    words = text.split()
    assert stop.value.code == 0
    assert [name for name, _ in fields() if f"--{name}" not in words] == []
    assert {"--config", "--dry-run"} <= set(words)
    assert "built-in model: 0.001" in " ".join(words)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--grpo.group_sise", "8"], ["--grpo.group_sise", "did you mean 'grpo.group_size'?"]),
        (["--lr", "1"], ["'--lr'", "did you mean 'grpo.lr'?"]),
        (["--grpo", "{lr: 1}"], ["'--grpo'", "unknown argument"]),
        (["--confg", "c.yaml"], ["'--confg'", "did you mean 'config'?"]),
        (["--dry_run"], ["did you mean 'dry-run'?"]),
        (["--grpo.l", "1e-5"], ["'--grpo.l'"]),  # no abbreviations
        (["extra"], ["unknown argument 'extra'", "--help"]),
        (["--grpo.lr"], ["--grpo.lr", "expected one argument"]),
        (["--grpo.group_size", "1"], ["grpo.group_size = 1", ">= 2"]),
        (["--grpo.num_steps", "yes"], ["grpo.num_steps = True", ">= 1"]),
        (["--task.rewards", "math"], ["task.rewards = 'math'", "list"]),
        (["--task.rewards", "[math"], ["--task.rewards '[math'", "not a YAML value"]),
        (["--grpo.lr", "2024-13-45"], ["--grpo.lr '2024-13-45'", "not a YAML value"]),
        (["--grpo.lr", '!!int ""'], ["--grpo.lr", "not a YAML value"]),
        (["--grpo.lr", "[" * 5000], ["--grpo.lr", "not a YAML value"]),
        (["--grpo.num_steps", "9" * 5000], ["--grpo.num_steps", "not a YAML value"]),
        (["--grpo.num_steps", "0x" + "f" * 5000], ["grpo.num_steps = a very long integer"]),
        (["--grpo.lr", ".nan"], ["grpo.lr = nan", "> 0"]),
        (["--grpo.lr", "-.inf"], ["--grpo.lr"]),
        (["--grpo.top_p", "0.9"], ["unknown argument", "--grpo.top_p"]),
    ],
)
def test_bad_arguments(argv: list[str], said: list[str]) -> None:
    message = refusal(*argv)
    assert all(part in message for part in said), message
    assert len(message) < 500


LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefgh"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grpo:\n  lr: 1\n  lr: 2\n", ["line 2", "'lr' given twice"]),
        ("grpo:\n\tlr: 1\n", ["line 2", "'\\t'"]),
        ("grpo: [1, 2\n", ["line", "correct the YAML"]),
        ("a: b: c\n", ["line 1", "mapping values are not allowed"]),
        ("- grpo\n- seed\n", ["['grpo', 'seed']", "not a mapping"]),
        ("hello\n", ["'hello'", "not a mapping"]),
        ("---\nseed: 1\n---\nseed: 2\n", ["line 3", "another document"]),
        ("seed: !!python/object/apply:os.system ['true']\n", ["could not determine a constructor"]),
        ('seed: !!int ""\n', ["correct the YAML"]),
        ("seed: 2024-13-45\n", ["correct the YAML"]),
        ("? [a, b]\n: 1\n", ["line 1", "correct the YAML"]),
        ("a: *nothing\n", ["undefined alias"]),
        ("[" * 5000, ["correct the YAML"]),
        (b"\xff\xfe\x00binary", ["not UTF-8"]),
        (b"\x00\x01\x02", ["not allowed", "correct the YAML"]),
        ("grpo: &g\n  lr: 1e-5\n  deeper: *g\n", ["grpo.deeper: unknown setting"]),
        (LAUGHS, ["a: unknown setting", "(and 7 more)"]),
        ("1: 2\n", ["1 = 1: keys should be strings"]),
        ("grpo:\nseed: 1\n", ["grpo = None", "mapping of settings"]),
    ],
)
def test_bad_files(tmp_path: Path, text: str | bytes, said: list[str]) -> None:
    path = written(tmp_path, text)
    started = time.monotonic()
    message = refusal("--config", path)
    assert path in message
    assert all(part in message for part in said), message
    assert len(message) < 500 + len(path)
    assert time.monotonic() - started < 5


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "Is a directory; give the path of a YAML file" in refusal("--config", str(tmp_path))
    assert "No such file" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "Not a directory" in refusal("--config", written(tmp_path, "") + "/c.yaml")
    with pytest.raises(ConfigError):
        read_yaml("\0")


@pytest.mark.parametrize("text", ["grpo: 5\n", "grpo: [lr]\n", "grpo:\n", "model: {tiny: 3}\n"])
def test_an_override_does_not_hide_a_bad_group(tmp_path: Path, text: str) -> None:
    message = refusal("--config", written(tmp_path, text), "--grpo.lr", "1e-5", "--model.tiny.layers", "1")
    assert "mapping of settings" in message


# ---- the script itself ----


def script(folder: Path, *argv: str, code: str | None = None) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run train.py (or `code` beside it) in an empty folder, at home nowhere; and the seconds it took."""
    home, cwd = folder / "home", folder / "cwd"
    home.mkdir(), cwd.mkdir()
    hidden = ("HF_", "XDG_", "OVERLAPRL_", "RAY_", "TRANSFORMERS_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {"HOME": str(home)}
    command = [sys.executable, *(["-c", code] if code else [str(SCRIPT)]), *argv]
    started = time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    taken = time.monotonic() - started
    assert [str(p) for p in (*home.rglob("*"), *cwd.rglob("*"))] == [], "written"
    return done, taken


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--grpo.group_sise", "8"], "did you mean 'grpo.group_size'?"),
        (["--task.name", "records", "--task.path", "none.jsonl"], "task.path: no file none.jsonl"),
        (["--grpo.model_name", "no-such-model"], "grpo.model_name = 'no-such-model': cannot be loaded"),
        (["--grpo.model_name", "no-such/model", "--dry-run"], "grpo.model_name = 'no-such/model': cannot be loaded"),
        (["--task.name", "gsm8k"], "'openai/gsm8k:main' is no local file or folder"),
    ],
)
def test_the_script_fails_at_once(tmp_path: Path, argv: list[str], said: str) -> None:
    if "gsm8k" in argv:  # offline, so that the test is the same wherever there is a hub
        done, taken = script(tmp_path, *argv, code=WITHOUT_HUB)
    else:
        done, taken = script(tmp_path, *argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert taken < 15


WITHOUT_HUB = f"""
import runpy, socket, sys

def nowhere(*arguments, **options):
    raise socket.gaierror("no network")

socket.getaddrinfo = nowhere
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_bad_file_does_not_wait_for_torch_and_ray(tmp_path: Path) -> None:
    path = written(tmp_path, "grpo: {lrr: 1}\n")
    code = f"""
import runpy, sys
sys.argv = [{str(SCRIPT)!r}, "--config", {path!r}]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    print(stop.code, [m for m in ("torch", "ray", "transformers", "datasets") if m in sys.modules])
"""
    done, taken = script(tmp_path, code=code)
    assert done.stdout == "2 []\n"
    assert "did you mean 'grpo.lr'?" in done.stderr
    assert taken < 5


def test_dry_run_prints_configuration_and_plan_and_leaves_nothing(tmp_path: Path) -> None:
    done, _ = script(tmp_path, "--dry-run", "--grpo.num_steps", "3")
    assert (done.returncode, done.stderr) == (0, "")
    config, _, plan = done.stdout.partition("# ")
    resolved = parse("--grpo.num_steps", "3", "--model.engine", "hf")  # what auto means without a GPU
    assert yaml.safe_load(config) == resolved.model_dump(mode="json")
    assert "problems to train on" in plan
    assert all(role in plan for role in ("generator:", "reference:", "learner:"))
