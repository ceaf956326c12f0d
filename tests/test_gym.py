"""Puzzles of reasoning-gym: real datasets, their real scorers, and a run on one."""

import importlib.util
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import read_jsonl, small
from reasoning_gym.factory import DATASETS

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.config.cli import load_config
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runtime.train import train
from overlaprl_ray.tasks import build_task, columns_of
from overlaprl_ray.tasks.gym_scores import EVALUATING, harmless, read_number, read_text
from overlaprl_ray.tasks.rewards import extracted, load_rewards, score

SUMS = {"max_terms": 2, "max_digits": 2}


def sums(**settings):
    return build_task(TaskConfig(name="gym:chain_sum", gym={**SUMS, "size": 400}, eval_size=64, **settings))


def marks(task, completion, problem=0):
    """The first reward of a completion to one training problem."""
    problem = task.train[problem]
    _, parts = score(load_rewards(task.rewards), None, [problem.prompt], [completion], columns_of([problem]))
    return next(iter(parts.values()))[0]


def test_sums_have_the_parameters_asked_for_and_are_what_they_say():
    task = sums()
    assert task.rewards == ("gym_number",)
    for problem in (*task.train, *task.heldout):
        expression = problem.prompt.removeprefix("State the final answer to the following arithmetic problem: ")
        first, sign, second, _ = expression.split()
        assert int(problem.answer) == int(first) + int(second) * {"+": 1, "-": -1}[sign]
        assert max(int(first), int(second)) < 100


def test_no_question_is_there_twice_and_none_has_the_words_of_a_held_out_one():
    """chain_sum draws 12 + 34 and 34 + 12: one known, the other is no held-out problem."""
    task = build_task(TaskConfig(name="gym:chain_sum", gym={**SUMS, "max_digits": 1, "size": 300}, eval_size=33))
    prompts = [problem.prompt for problem in (*task.heldout, *task.train)]
    assert len(task.heldout) == 33
    assert len(set(prompts)) == len(prompts) < 300
    train, held = ({" ".join(sorted(p.prompt.split())) for p in side} for side in (task.train, task.heldout))
    assert not train & held
    assert len(train) < len(task.train)  # such pairs do occur


def test_the_split_is_the_tasks_own_and_its_seed_changes_it():
    assert sums() == sums() == pickle.loads(pickle.dumps(sums()))
    other = build_task(TaskConfig(name="gym:chain_sum", gym={**SUMS, "size": 400, "seed": 7000}, eval_size=64))
    assert other.heldout != sums().heldout


def test_a_task_draws_the_same_in_every_process():
    code = (
        "import hashlib; from overlaprl_ray.config import TaskConfig; from overlaprl_ray.tasks import build_task\n"
        "for name in ('chain_sum', 'countdown', 'letter_counting', 'number_sorting', 'acre'):\n"
        "    task = build_task(TaskConfig(name=f'gym:{name}', gym={'size': 40}, eval_size=8))\n"
        "    print(name, hashlib.md5(repr((task.train, task.heldout)).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
    assert "countdown" in seen.pop()


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("{}", True),
        (" {}.\n", True),
        ("The answer is {}", True),
        ("5 and 7 make **{}**", True),
        ("<answer>{}</answer> or 3?", True),
        ("<answer> +{}.00 </answer>", True),
        ("<answer>12345</answer> {}", False),
        ("{} is less than 12345", False),
        ("", False),
        ("no idea", False),
    ],
)
def test_numbers_are_read_from_a_tag_else_last_in_the_text(completion, right):
    task = sums()
    index = next(i for i, problem in enumerate(task.train) if int(problem.answer) > 9)
    completion = completion.format(task.train[index].answer)
    assert (marks(task, completion, index) == 1.0) == right


@pytest.mark.parametrize("unit", ["<answer>", "</answer>", "1", "1,", "<answer>1</answer>", " ", "-", "("])
def test_long_text_takes_bounded_time(unit):
    started = time.perf_counter()
    for read in (read_text, read_number, harmless):
        read(unit * 100_000)
    assert time.perf_counter() - started < 2


def test_answers_that_are_no_numbers_are_the_whole_completion_or_a_tag():
    task = build_task(TaskConfig(name="gym:spell_backward", gym={"size": 60}, eval_size=16))
    assert task.rewards == ("gym",)
    answer = task.train[0].answer
    assert marks(task, f" {answer}\n") == 1.0
    assert marks(task, [{"role": "user", "content": "7"}, {"role": "assistant", "content": answer}]) == 1.0
    assert marks(task, f"It is <answer>{answer}</answer>") == 1.0
    assert marks(task, f"It is {answer}") < 1.0


def test_reading_for_logs_is_the_reading_of_the_reward():
    assert extracted("gym_number", "so 1,234.50 it is") == read_number("so 1,234.50 it is") == "1234.50"
    assert extracted("gym", " a b \n") == read_text(" a b \n") == "a b"
    assert extracted("gym_number", "none") is None


def test_any_right_expression_solves_countdown_not_only_the_one_it_was_made_from():
    task = build_task(
        TaskConfig(name="gym:countdown", gym={"size": 40, "min_numbers": 3, "max_numbers": 3}, eval_size=8)
    )
    assert task.rewards == ("gym",)
    item = task.train[0].columns["gym"].entry
    assert marks(task, item["answer"]) == 1.0
    assert marks(task, f"0 + ({item['answer']})") < 1.0  # a number that was not given
    assert marks(task, f"<answer>-(-({item['answer']}))</answer>") == 1.0  # another text, the same value
    one, two, three = item["metadata"]["numbers"]
    assert marks(task, f"{one} + {two} + {three}") == (1.0 if one + two + three == item["metadata"]["target"] else 0.05)


def test_completions_that_would_run_code_or_for_ever_are_wrong_and_never_run(tmp_path):
    task = build_task(TaskConfig(name="gym:countdown", gym={"size": 40}, eval_size=8))
    made = tmp_path / "made"
    for attack in (
        f"open('{made}', 'w')", f"__import__('pathlib').Path('{made}').touch()", "9**9**9", "9**(9**9)",
        "(9**99)**9999", "((((9**99)**99)**99)**99)**99", "99999999!", "[0]*10**10", "'a'*10**10", "1<<10**10",
        "9**(2*9**9)", "9**(99*99*99*99*99)", "9**((2)*9**9)", "9**99**99", "open\\\n('x')", "9**999", "9**-999",
        "9**(99*99 or x)", "9**(9+9**9)", "(lambda: 1)()", "().__class__", "x.y", "(print)(1)", "1+" * 5000 + "1",
    ):  # fmt: skip
        assert marks(task, attack) == 0.0, attack
        assert not made.exists()


def test_powers_and_functions_of_calculus_are_harmless():
    for text in ("x**12 - 3*x**2", "E**(-2*x) + C", "(1 - 4*x**2)**(3/2)", "exp(x)*asin(2*x)", "2**x", "3**-2", "x**y"):
        assert harmless(text), text


@pytest.mark.parametrize("name", sorted(EVALUATING))
def test_right_answers_are_harmless(name, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    task = build_task(TaskConfig(name=f"gym:{name}", gym={"size": 30}, eval_size=4))
    for problem in task.train:
        # one dataset's own answer is at times an integral left as it stands, which asks sympy to do the work
        assert harmless(problem.answer) != ("Integral" in problem.answer), problem.answer


SLOW_TO_DRAW = {"knight_swap", "zebra_puzzles", "intermediate_integration", "arc_agi", "rearc", "codeio"}


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"} - SLOW_TO_DRAW))
def test_every_dataset_builds_and_gives_its_own_answer_full_marks(name, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    task = build_task(TaskConfig(name=f"gym:{name}", gym={"size": 12}, eval_size=2))
    problems = [*task.heldout, *task.train]
    functions = load_rewards(task.rewards)
    prompts, columns = [p.prompt for p in problems], columns_of(problems)
    total, _ = score(functions, None, prompts, [problem.answer for problem in problems], columns)
    assert all(mark == 1.0 for mark, problem in zip(total, problems, strict=True) if problem.answer)
    for garbage in ("", "x (", "{[", "<answer></answer>", "\x00", "7", "None", "é" * 50):
        total, _ = score(functions, None, prompts, [garbage] * len(problems), columns)
        assert all(0 <= mark <= 1 for mark in total)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "gym:chain_summ"}, ["task.name", "'chain_summ'", "did you mean 'chain_sum'?"]),
        ({"name": "gym:composite"}, ["task.name", "'composite'"]),
        ({"gym": {"max_term": 2}}, ["task.gym.max_term", "did you mean 'max_terms'?"]),
        ({"gym": {"qqqq": 2}}, ["task.gym.qqqq", "it has", "max_terms"]),
        ({"gym": {"min_terms": 5, "max_terms": 2}}, ["task.gym", "max_terms must be >= min_terms"]),
        ({"gym": {"max_terms": "two"}}, ["task.gym", "'two'"]),
        ({"gym": {"size": 0}}, ["task.gym.size = 0", "from 1"]),
        ({"gym": {"size": True}}, ["task.gym.size = True"]),
        ({"gym": {"seed": -1}}, ["task.gym.seed = -1"]),
        ({"gym": {"size": 100}, "eval_size": 100}, ["task.eval_size: 100", "task.gym.size larger"]),
        ({"prompt_template": "{expression}"}, ["task.prompt_template", "{question}"]),
        ({"name": "arithmetic", "gym": {"max_terms": 2}}, ["task.gym", "gym:<dataset>"]),
        ({"name": "arithmetic", "rewards": ["gym"]}, ["task.rewards", "gym cannot judge arithmetic"]),
    ],
)
def test_slips_are_named_with_what_to_do(settings, said):
    with pytest.raises(ConfigError) as error:
        build_task(TaskConfig(**{"name": "gym:chain_sum", "eval_size": 16, **settings}))
    assert "\n" not in str(error.value)
    for text in said:
        assert text in str(error.value)


def test_without_the_package_the_error_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'overlaprl_ray\[gym\]'"):
        sums()


@pytest.mark.parametrize("hash_seed", [None, "random"])
def test_a_dataset_that_follows_string_hashes_wants_them_fixed(hash_seed, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if hash_seed:
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        build_task(TaskConfig(name="gym:word_ladder"))


@pytest.mark.ci
def test_a_run_on_one_through_ray(local_ray, tmp_path):
    config = small(
        grpo={"num_steps": 2},
        task={"name": "gym:chain_sum", "gym": {"max_terms": 2, "max_digits": 1, "size": 300}, "rewards": []},
        output={"dir": str(tmp_path / "run"), "completions_every": 1},
    )
    summary = train(config)
    assert summary["steps"] == 2
    rows = read_jsonl(tmp_path / "run" / "completions.jsonl")
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert row["prompt"].startswith("State the final answer")
        assert row["reward"] == row["rewards"]["gym_number"]
        assert row["extracted"] == read_number(row["completion"])


def test_the_shipped_configuration_of_a_gym_task_builds():
    config = load_config(Path(__file__).parent.parent / "scripts/configs/smollm2_gym.yaml")
    task = build_task(config.task)
    assert len(task.heldout) == 64
    assert len(task.train) == 135  # of 200 questions; one left out, whose words a held-out one has
