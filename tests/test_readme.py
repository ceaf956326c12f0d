"""README: short, its commands understood by the scripts, its examples up to date; no document has a dead link."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

import overlaprl_ray
from overlaprl_ray.config.cli import parse_command_line
from overlaprl_ray.reports.cli import parse_report_command
from overlaprl_ray.tune.cli import parse_sweep_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "analysis").rglob("*.md"))]


def blocks(language: str, text: str = README) -> list[str]:
    """Code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_it_is_read_in_minutes():
    lines = README.splitlines()
    assert len(lines) <= 180
    assert len(README.split()) <= 1800
    assert max(map(len, lines)) <= 120


def test_it_names_the_test_command():
    assert any(line.startswith("Test: ") and line.endswith("pytest`") for line in README.splitlines())


def parse(script: str, argv: list[str]) -> None:
    """Read a command line as the script does; unknown options and bad values raise."""
    if script == "sweep.py":
        parse_sweep_command(argv)
    elif script == "report.py":
        parse_report_command(argv)
    else:
        parse_command_line(script, "", argv, importlib.import_module(script.removesuffix(".py")).options)


def test_every_command_is_understood(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    guide = (ROOT / "analysis" / "guide.md").read_text(encoding="utf-8")
    text = "".join(blocks("bash", README + guide)).replace("\\\n", "")
    text = text.replace("runs/x/config.yaml", "scripts/configs/gpu_check.yaml")
    lines = [line.removeprefix("PYTHONPATH=. ").split(" #")[0] for line in text.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("python scripts/")]
    assert {Path(command[0]).name for command in commands} >= {"train.py", "sweep.py", "report.py"}
    for path, *argv in commands:
        assert Path(path).exists()
        if "--resume" not in argv:  # which needs a run's folder: test_storage.py
            parse(Path(path).name, argv)


def test_the_sweep_it_shows_is_the_shipped_one():
    (shown,) = blocks("yaml")
    shipped = yaml.safe_load((ROOT / "tune_configs" / "smoke.yaml").read_text(encoding="utf-8"))
    for group, settings in yaml.safe_load(shown).items():
        assert settings.items() <= shipped[group].items()


def test_python_examples_import_what_there_is():
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "overlaprl_ray"
                assert {name.name for name in node.names} <= set(overlaprl_ray.__all__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_dead(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        if not target.startswith(("http", "#")):
            assert (path.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tests_that_are_named_exist(path):
    for name in re.findall(r"\b(?:test_\w+|vllm_engine)\.py\b", path.read_text(encoding="utf-8")):
        assert (ROOT / "tests" / name).exists(), name
