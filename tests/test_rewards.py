"""Rewards and answer extraction: the traps of the field, exactness, bounded time, and errors that name the sample."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.tasks import Problem, Task, rewards
from overlaprl_ray.tasks.answers import extract_gsm8k_answer, extract_math_answer, last_box, parse_number, same_answer
from overlaprl_ray.tasks.reward_check import check_rewards
from overlaprl_ray.tasks.rewards import RewardError, extracted, load_rewards, score, text_of

GSM8K = Path(os.environ.get("OVERLAPRL_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"))


def reward(name: str, completion: object, answer: object) -> float:
    [value] = rewards.BUILT_IN[name](prompts=["?"], completions=[completion], answer=[answer], question=["?"])
    return value


# ---- Extraction ----


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", "1234"),
        ("#### -3", "-3"),
        ("#### 3.0", "3"),
        ("#### 18.", "18"),
        ("#### 50%", "50"),
        ("#### -$1,234.50", "-2469/2"),
        ("#### **18**", "18"),
        ("#### \u22123", "-3"),  # unicode minus
        ("so 3 + 4 = 7\n#### 7\nDone in 2 steps.", "7"),  # the mark beats the last number
        ("#### 7\n\\boxed{8}", "7"),  # and the box
        ("#### 7\nWait.\n#### 8", "8"),  # the last mark
        ("#### Step 2\nHence \\boxed{18}.", "18"),  # a Markdown heading is no mark
        (r"\boxed{1} or rather \boxed{2}, out of 9", "2"),  # the last box, and no number after it
        (r"\boxed{18} and \boxed{}", "18"),  # an empty box is none
        (r"\boxed{18} and \boxed{19", "18"),  # an open one neither
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\frac{36}{2} \text{ eggs}}", "18"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        (r"\boxed{\dfrac12}", "1/2"),
        (r"\boxed{2\frac{1}{2}}", "5/2"),
        ("\\boxed{\\frac{ 1 }\n  {2}}", "1/2"),
        (r"\boxed{3 \times 6 = 18}", "18"),
        (r"\boxed{5 \text{ m}^2}", "5"),
        (r"\boxed{1{,}000{,}000}", "1000000"),
        (r"\boxed{1\,000\,000}", "1000000"),
        (r"5 \boxed{\text{none}}", None),  # the model answered, though with no number
        (r"\boxed{\frac{1}{0}}", None),
        ("The answer is 1/2", "1/2"),
        ("It costs $1,234.56 in all.", "30864/25"),
        ("20-3", "3"),  # a minus between numbers is no sign
        ("10\u201312 days", "12"),  # nor is a dash in a range
        ("- 18 eggs", "18"),  # nor a bullet
        ("an area of 5 m^2, or 5 m^{2}", "5"),  # an exponent is no answer
        ("that makes x2 = .5", "1/2"),
        ("(1,23)", "23"),  # no thousands separator
        ("7" * 101, None),  # beyond any answer
        ("", None),
        ("no idea", None),
    ],
)
def test_extract_gsm8k_answer(text: str, number: str | None) -> None:
    assert extract_gsm8k_answer(text) == number
    assert extracted("gsm8k", text) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{a}{b^{2}}} .", r"\frac{a}{b^{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"} \boxed{1} {", "1"),
        (r"\boxed {x}", "x"),
        (r"{\boxed{1}", "1"),
        (r"\boxed{ }", None),
        (r"\boxed{\frac{1}{2}", None),
        ("boxed{1}", None),
    ],
)
def test_last_box(text: str, content: str | None) -> None:
    assert last_box(text) == content
    assert reward("boxed_format", text, "anything") == (content is not None)


def test_extract_math_answer_prefers_the_box() -> None:
    texts = (r"3 \boxed{x+1} #### 5", "x = 3\n#### 5\n7", "so 3, then 7")
    assert [extract_math_answer(text) for text in texts] == ["x+1", "5", "7"]


@given(st.fractions(-(10**12), 10**12, max_denominator=10**6))
def test_numbers_are_read_exactly(value: Fraction) -> None:
    sign, top = "-" * (value < 0), abs(value.numerator)
    for text in (f"{sign}{top}/{value.denominator}", rf"${sign}\frac{{{top}}}{{{value.denominator}}}$"):
        assert parse_number(text) == value
    assert parse_number(f"{value.numerator:,}.") == value.numerator
    assert parse_number(f"{value.numerator}.000 %") == value.numerator


@pytest.mark.parametrize("text", ["5x", "1 2", "x=3", "(1,2)", "18 eggs", "", "1/0", "1e5x", "1e999"])
def test_parse_number_wants_a_number_and_nothing_else(text: str) -> None:
    assert parse_number(text) is None


# ---- Comparison ----


@pytest.mark.parametrize("name", ["gsm8k", "math"])
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("3", "3.0", True),
        ("1,000,000", "1000000", True),
        ("0.5", "1/2", True),
        ("1000000", "1000000.0000000000001", False),
        ("1/3", "0.3333333333", False),
        ("123456789012345678901", "123456789012345678902", False),  # equal as floats
        ("-3", "3", False),
        ("0.00001", "1e-05", True),
        ("1e-7", "1e-8", False),  # equal to math-verify, which rounds
        ("3 × 10^8", "300000000", True),
        (r"6.02 \cdot 10^{23}", "602" + "0" * 21, True),
        ("10⁻⁵", "1/100000", True),
        ("−５．５", "-5.5", True),  # full-width digits and point
        ("2½", "5/2", True),
        ("1 000 000", "1000000", True),
    ],
)
def test_numbers_compare_without_tolerance(name: str, one: str, other: str, same: bool) -> None:
    assert reward(name, rf"\boxed{{{one}}}", other) == same
    assert reward(name, rf"\boxed{{{other}}}", one) == same


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("(x+1)(x+2)", "x^2+3x+2", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        (r"\left(1, 2\right)", "(1,2)", True),
        ("x=3", "3", True),
        ("blue", r"\text{blue}", True),
        ("2^{10}", "1024", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1)", "(0,1)", False),
        (r"\frac{1}{0}", "1", False),
        ("9^{9^{9^9}}", "9^{9^{9^9}}", True),  # as written
    ],
)
def test_expressions(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same
    assert reward("math", rf"so \boxed{{{answer}}}.", rf"A solution ends in \boxed{{{gold}}}.") == same


def test_expressions_compare_in_any_thread() -> None:  # math-verify's own time limit works in the main one only
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(same_answer, "z+7", "7+z").result() is True


def test_exact_match_is_strict_but_for_whitespace() -> None:
    assert reward("exact_match", " 92\n", "92") == 1.0
    assert [reward("exact_match", text, "92") for text in ("92.", "The answer is 92", "", "092")] == [0.0] * 4


@pytest.mark.parametrize("name", rewards.BUILT_IN)
def test_chat_completions_count_as_their_last_message(name: str) -> None:
    chat = [{"role": "assistant", "content": "5"}, {"role": "assistant", "content": r"\boxed{92}"}]
    answer = r"\boxed{92}" if name == "exact_match" else "92"
    assert reward(name, chat, answer) == 1.0
    assert reward(name, [], "92") == reward(name, [{"role": "assistant", "content": None}], "92") == 0.0
    assert text_of(chat) == r"\boxed{92}"


# ---- The real data: every gold answer, as its own solution writes it ----


def test_gsm8k_solutions_score_their_own_answers_only() -> None:
    if not GSM8K.is_dir():
        pytest.skip(f"no GSM8K at {GSM8K}; set OVERLAPRL_GSM8K to a folder with train.jsonl and test.jsonl")
    lines = [line for split in ("train", "test") for line in (GSM8K / f"{split}.jsonl").read_text("utf-8").splitlines()]
    solutions = [json.loads(line)["answer"] for line in lines]
    answers = [solution.rpartition("####")[2].strip() for solution in solutions]
    values = [int(answer.replace(",", "")) for answer in answers]
    assert len(answers) == 8792
    assert [extract_gsm8k_answer(answer) for answer in answers] == [str(value) for value in values]
    assert sum(rewards.gsm8k([], solutions, answers)) == len(answers)
    following = answers[1:] + answers[:1]
    same = [float(one == next_one) for one, next_one in zip(values, values[1:] + values[:1], strict=True)]
    assert rewards.gsm8k([], solutions, following) == same
    assert rewards.math([], solutions, following) == same


# ---- Nothing raises, nothing takes long ----

TOKENS = r"""
\boxed{ \frac{ \sqrt{ \text{ \left( \right) \{ \} \\ \$ { } ( ) [ ] ^ ^{ _ $ # #### / 0 1 9 99 , . - + = < x y % !
\pi \infty \cdot \pm \begin{pmatrix} \end{pmatrix} & | \cup \le \times \int \sum
"""
LATEX = st.lists(st.sampled_from([*TOKENS.split(), " ", "\n"]), max_size=25).map("".join)


@settings(max_examples=250, deadline=None)
@given(st.one_of(st.text(max_size=60), LATEX), st.one_of(st.text(max_size=20), LATEX))
@example("\\boxed{\u0660}", "0")
@example("\\boxed{\x00}", "\ud800")
def test_no_text_makes_a_built_in_reward_raise(text: str, answer: str) -> None:
    for completion in (text, rf"\boxed{{{text}}}", [{"role": "assistant", "content": f"#### {text}"}]):
        for name in rewards.BUILT_IN:
            assert reward(name, completion, answer) in (0.0, 1.0)
            assert extracted(name, completion) is None or isinstance(extracted(name, completion), str)


PIECES = [
    "1", "1,", "1 ", "1/", "-", " ", "\n", "#", "#### 1", "{", "}", r"\boxed{", r"\boxed{1}", r"\frac", r"\frac{1}{",
    "$", "1e1", "1 x 10^", "1\u2009000\u2009", "½", "²", "1" + " " * 100, r"\frac" + " " * 300, r"\boxed" + " " * 50,
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("name", rewards.BUILT_IN)
def test_long_text_takes_bounded_time(name: str, piece: str) -> None:
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    for completion in (text, rf"\boxed{{{text}}}", "#### " + text, "1" + text + "x"):
        reward(name, completion, "5")
    assert time.process_time() - start < 1.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "bomb",
    ["9^{9^{9^{9}}}", "9^9^9^9", "9^999999999", "(9^{999})^{999}", "(9^{99})^{(9^{99})}", "9**9**9**9", "99999999!",
     "(a+b+c+d+e+f)^{12}", "(x+y+z)^{99}", "(" * 58 + "x" + ")" * 58, "{" * 58 + "x" + "}" * 58,
     r"\binom{10^{9}}{10^{8}}", r"\sum_{k=1}^{10^{9}} \frac{1}{k}", "+".join(["x"] * 5000)],
)  # fmt: skip
def test_no_expression_takes_long_to_compare(bomb: str) -> None:
    same_answer("x+1", "1+x")  # loads sympy
    start = time.process_time()
    assert reward("math", rf"\boxed{{{bomb}}}", "x^2+1") == 0.0
    assert reward("math", r"\boxed{x^2+1}", bomb) == 0.0
    assert time.process_time() - start < 1.0


# ---- Loading and scoring ----


def test_load_rewards_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def brevity(completions, **_):\n    return [1 / len(c) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    functions = load_rewards(["own_rewards:brevity", "gsm8k"])
    assert list(functions) == ["own_rewards:brevity", "gsm8k"]
    total, parts = score(functions, [2.0, 0.5], ["a", "b"], ["#### 2", "3"], {"answer": ["2", "4"]})
    assert parts == {"own_rewards:brevity": [1 / 6, 1.0], "gsm8k": [1.0, 0.0]}
    assert total == pytest.approx([2 / 6 + 0.5, 2.0])
    assert score(functions, None, ["a"], ["2"], {"answer": ["2"]})[0] == [2.0]
    assert extracted("own_rewards:brevity", "text") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("accuracy", "exact_match, gsm8k, math, boxed_format"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("overlaprl_ray.tasks.rewards:boxed_formatt", "did you mean 'boxed_format'"),
        (":f", "cannot be imported"),
        ("broken_rewards:f", "SyntaxError"),
        ("gsm8k", "is there twice; name it once and set its task.reward_weights"),
    ],
)
def test_unknown_rewards(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_rewards(["gsm8k", name])
    assert all(part in str(error.value) for part in ("task.rewards", repr(name), said))


def raises_on_bad(completions: list[str], **_: object) -> list[float]:
    return [{"good": 1.0}[text] for text in completions]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises_on_bad, "KeyError: 'bad"),
        (lambda completions, **_: [math.nan if c.startswith("bad") else 1.0 for c in completions], "nan"),
        (lambda completions, **_: [1e300 * c.startswith("bad") for c in completions], "1e+300"),  # as float32 inf
    ],
)
def test_score_names_the_sample_to_blame(function: rewards.RewardFunction, said: str) -> None:
    bad = "bad" + "x" * 1000
    with pytest.raises(RewardError) as error:
        score({"own": function}, None, ["first?", "second?"], ["good", bad], {"answer": ["1", "2"]})
    message = str(error.value)
    assert isinstance(error.value, RunError)
    assert all(part in message for part in ("reward 'own'", said, "'second?'", "completion 'badxxx"))
    assert "first?" not in message
    assert bad not in message.partition("; completion ")[2], "shortened"
    assert len(message.partition("; prompt ")[2]) < 300


def fails_on_batches(completions: list[str], **_: object) -> list[float]:
    if len(completions) > 1:
        raise RuntimeError("too many")
    return [1.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda **_: [1.0], "returned 1 values for 2 completions"),
        (lambda **_: None, "returned a NoneType for 2 completions"),
        (fails_on_batches, "raised RuntimeError: too many, though for no completion alone"),
    ],
)
def test_score_refuses_a_wrong_count(function: rewards.RewardFunction, said: str) -> None:
    with pytest.raises(RewardError) as error:
        score({"own": function}, None, ["first?", "second?"], ["one", "two"], {"answer": ["1", "2"]})
    assert all(part in str(error.value) for part in ("reward 'own'", said, "'first?'", "'one'"))


def test_each_row_of_each_reward_has_its_own_copy() -> None:
    tests = [1, 2]  # of a problem, so of all rows of its group

    def spoils(prompts: list[str], completions: list[str], tests: list[list[int]], **_: object) -> list[float]:
        got = [float(row.pop()) for row in tests]
        for values in (prompts, completions):
            values[:] = ["spoilt"] * 2
        return got

    data = (["p", "q"], ["a", "b"], {"answer": ["1", "2"], "tests": [tests, tests]})
    _, parts = score({"first": spoils, "second": spoils}, None, *data)
    assert parts == {"first": [2.0, 2.0], "second": [2.0, 2.0]}
    assert data == (["p", "q"], ["a", "b"], {"answer": ["1", "2"], "tests": [[1, 2], [1, 2]]})


async def judge(completions: list[str], **_: object) -> list[float]:
    return [3.0] * len(completions)


def whole(prompts: list[str], completions: list[str], answer: list[str], **rest: object) -> list[int]:
    assert (prompts, completions, answer) == (["p", "q"], ["a", "bc"], ["1", "2"])
    assert set(rest) == {"completion_ids", "level", "trainer_state", "log_extra", "log_metric"}
    return [1, 0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (whole, [1, 0]),
        (lambda completions: [float(len(c)) for c in completions], [1, 2]),
        (lambda answer, completion_ids: [float(answer[i]) + completion_ids[i][0] for i in (0, 1)], [8, 8]),
        (lambda trainer_state, log_metric, **_: [log_metric("n", 5) or trainer_state.global_step] * 2, [6, 6]),
        (lambda log_extra, level, unit="cm": log_extra("unit", [unit] * 2) or level, [3, 4]),
        (judge, [3, 3]),
    ],
)
def test_functions_get_what_they_have_parameters_for(function: rewards.RewardFunction, expected: list[float]) -> None:
    logged: dict[str, object] = {}
    columns = {"answer": ["1", "2"], "completion_ids": [[7], [6]], "level": [3, 4]}
    log = {"log_extra": logged.__setitem__, "log_metric": logged.__setitem__}
    tools = {"trainer_state": SimpleNamespace(global_step=6), **log}
    total, _ = score({"own": function}, [0.5], ["p", "q"], ["a", "bc"], columns, tools)
    assert total == [value / 2 for value in expected]
    assert logged in ({}, {"n": 5}, {"unit": ["cm", "cm"]})


def test_sums_leave_out_rewards_that_abstain_as_trl_does() -> None:
    table = torch.tensor([[1.0, 2.0], [math.nan, 3.0], [4.0, math.nan], [math.nan, math.nan]])
    weights = torch.tensor([0.5, 2.0])

    def column(i: int) -> rewards.RewardFunction:
        return lambda **_: [None if math.isnan(x) else x for x in table[:, i].tolist()]

    total, _ = score({"a": column(0), "b": column(1)}, weights.tolist(), [""] * 4, [""] * 4, {})
    assert total[:3] == (table * weights).nansum(dim=1)[:3].tolist()  # grpo_trainer.py
    assert math.isnan(total[3])


# ---- Before a run: can its rewards be earned? ----


def checked(rewards_: list[str], *answers: str, **settings: object) -> tuple[str, ...]:
    problems = [Problem("1+1?", answer, {}, where=f"row {row}") for row, answer in enumerate(answers)]
    return check_rewards(Task("t", problems, problems[:1], tuple(rewards_)), TaskConfig(**settings)).notices


@pytest.mark.parametrize(
    ("name", "answer"),
    [("math", "The answer is 2."), ("math", "12 apples"), ("math", "Paris"), ("math", "yes"), ("math", r"\frac{x}{2}"),
     ("gsm8k", "Paris"), ("gsm8k", "two")],
)  # fmt: skip
def test_answers_that_their_reward_never_accepts_are_refused(name: str, answer: str) -> None:
    with pytest.raises(
        ConfigError, match=r"task\.rewards: .* full marks to no answer of the data \(row 0: answer '"
    ) as error:
        checked([name], answer, answer)
    assert repr(answer) in str(error.value)
    (notice,) = checked([name], "2", answer, answer, "#### 2")
    assert "2 of 5 answers" in notice
    assert "row 1" in notice


@pytest.mark.parametrize(
    ("names", "answer", "settings"),
    [
        (["math"], "1e-05", {}),
        (["math"], "x = 3", {}),
        (["gsm8k"], "The answer is 2.", {}),
        (["exact_match"], "The answer is 2.", {}),
        (["math"], r"\boxed{x+1}", {}),
        (["math", "boxed_format"], "x+1", {}),
        (["math"], "Paris", {"system_prompt": r"Answer in \boxed{}."}),
        (["test_rewards:judge"], "The answer is 2.", {}),
    ],
)
def test_answers_that_can_be_given_are_not(names: list[str], answer: str, settings: dict[str, str]) -> None:
    assert checked(names, answer, answer, **settings) == ()


def test_a_reward_that_wants_a_column_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"'trl\.rewards:accuracy_reward' wants the column 'solution'; .* answer;"):
        checked(["trl.rewards:accuracy_reward"], "2")
