"""What a person sees of a run: a bar on a terminal, plain and few lines elsewhere."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from overlaprl_ray.runs import progress as module
from overlaprl_ray.runs.progress import Progress
from overlaprl_ray.workers.results import Evaluation

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
SHORT = ["--grpo.num_steps", "3", "--grpo.num_prompts_per_step", "4", "--grpo.group_size", "4", "--grpo.beta", "0",
         "--task.eval_size", "16", "--task.rewards", "[chatty:says]",
         "--model.tiny.warm_start_max_steps", "40", "--model.tiny.warm_start_batch", "64"]  # fmt: skip


def row(step: int, **values) -> dict:
    """A row of metrics.jsonl, as far as a person is told of it."""
    base = {"step": step, "wall_s": 0.5 * step, "reward": 0.01 * step, "tokens_per_s": 1234.0}
    return {**base, "staleness/kl": 0.012, "staleness/decision": "stale", **values}


def run(num_steps: int, console: Console) -> None:
    with Progress(num_steps, console) as progress:
        progress.say("run: somewhere")
        progress.evaluation(Evaluation(0, 0, 0.25, 16, (0.0, 1.0)))
        for step in range(1, num_steps + 1):
            progress.step(row(step))


def test_a_log_is_plain_and_stays_short_however_long_the_run(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.__setitem__(0, clock[0] + 2.0) or clock[0])
    text = io.StringIO()
    run(3000, Console(file=text, soft_wrap=True))
    lines = text.getvalue().splitlines()
    assert 40 <= len(lines) <= 60
    assert lines[:2] == ["run: somewhere", "held-out accuracy after step 0: 0.250 (n=16)"]
    assert lines[-1].startswith("step 3000/3000  reward 30.000  staleness KL 0.012 (stale)  1,234 tokens/s")
    assert "\x1b" not in text.getvalue()
    assert "\r" not in text.getvalue()


def test_a_step_of_minutes_gets_its_line(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    text = io.StringIO()
    with Progress(100_000, Console(file=text, soft_wrap=True)) as progress:
        for step in (1, 2):
            clock[0] += 400
            progress.step(row(step))
    assert len(text.getvalue().splitlines()) == 2


def test_a_quiet_console_prints_nothing(capsys):
    run(50, Console(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_with_the_last_step() -> None:
    text = io.StringIO()
    with Progress(40, Console(file=text, force_terminal=True, force_interactive=True, width=110)) as progress:
        progress.evaluation(Evaluation(0, 0, 0.25, 16, (0.0, 1.0)))
        progress.step(row(30))
        progress.step(row(31, **{"reward": None, "staleness/kl": None, "tokens_per_s": None,
                                 "staleness/decision": "discard"}))  # fmt: skip
        Console(file=(view := io.StringIO()), width=110).print(progress.bar)
    assert "\x1b[" in text.getvalue()
    assert re.fullmatch(r"step +31/40 .* reward -  staleness KL - \(discard\)  0 tokens/s", view.getvalue().strip())


CHATTY = """
def says(prompts, completions, answer, **columns):
    print("scoring")
    return [float(len(completion)) for completion in completions]
"""


def log_of(tmp_path: Path, *options: str) -> list[str]:
    """The lines of `train.py ... > log.txt 2>&1`; a reward function of the run prints."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    paths = os.pathsep.join([str(SCRIPT.parents[1]), str(tmp_path)])
    command = [sys.executable, str(SCRIPT), *SHORT, "--output.dir", "demo", *options]
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": "local"}
    with (tmp_path / "log.txt").open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment, check=True)
    text = (tmp_path / "log.txt").read_text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), "control codes"
    return text.splitlines()


@pytest.mark.ci
def test_the_scripts_output_in_a_file_is_clean_and_short(cache, tmp_path):
    lines, folder = log_of(tmp_path), str(tmp_path / "demo")
    assert lines[0] == f"run: {folder}"
    dashboard = re.compile(r"Ray dashboard: http://127\.0\.0\.1:\d+ \(.*`ray get-auth-token` prints\)")
    assert sum(bool(dashboard.fullmatch(line)) for line in lines) == 1
    assert lines[-1] == f"files: {folder}"
    assert len(lines) <= 20
    assert sum(line.startswith("held-out accuracy after") for line in lines) == 2
    assert "scoring" not in "".join(lines)


@pytest.mark.slow
def test_quiet_prints_the_folder_alone(cache, tmp_path):
    assert log_of(tmp_path, "--quiet") == [str(tmp_path / "demo")]


@pytest.mark.slow
def test_what_actors_print_is_shown_on_request_with_their_name(cache, tmp_path):
    said = [line for line in log_of(tmp_path, "--output.actor_logs", "true") if "scoring" in line]
    assert said
    assert all(re.match(r"\(demo/generator pid=\d+\) scoring", line) for line in said)
