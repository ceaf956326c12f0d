"""Tasks: what each one gives, the order of prompts, and one clear error for everything that can be wrong with data."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import Problem, build_task, columns_of, prompts_of_batch
from overlaprl_ray.tasks.answers import extract_gsm8k_answer
from overlaprl_ray.tasks.rewards import load_rewards, score

GSM8K = Path(os.environ.get("OVERLAPRL_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"))


def jsonl(path: Path, *rows: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"What is {i}?", "answer": i, "level": i % 3} for i in range(start, start + count)]


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), str(i), {}) for i in range(count)]


# ---- The order of prompts ----


@given(size=st.integers(1, 30), count=st.integers(1, 70), seed=st.integers(), batches=st.integers(1, 8))
def test_batches_cut_an_endless_stream_of_permutations(size: int, count: int, seed: int, batches: int) -> None:
    data = problems(size)
    # Last batch first: a batch does not depend on which others were asked for before.
    cut = {batch: prompts_of_batch(data, seed, batch, count) for batch in range(batches, 0, -1)}
    stream = [problem for batch in range(1, batches + 1) for problem in cut[batch]]
    assert [len(cut[batch]) for batch in cut] == [count] * batches
    assert stream == prompts_of_batch(data, seed, 1, count * batches), "batches follow on one another"
    for epoch in range(len(stream) // size):
        whole = stream[epoch * size : (epoch + 1) * size]
        assert Counter(p.prompt for p in whole) == Counter(p.prompt for p in data), "each problem once an epoch"


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    data = problems(50)
    epochs = [
        tuple(p.prompt for p in prompts_of_batch(data, seed, epoch, 50)) for seed in (0, 1) for epoch in (1, 2, 3)
    ]
    assert len({*epochs, tuple(p.prompt for p in data)}) == 7


def test_no_batch_out_of_nothing() -> None:
    for data, batch, count in (([], 1, 1), (problems(1), 0, 1), (problems(1), 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            prompts_of_batch(data, 0, batch, count)


# ---- Arithmetic ----


def pairs(problems: Sequence[Problem]) -> list[tuple[int, int]]:
    return [(p.columns["a"], p.columns["b"]) for p in problems]


@pytest.mark.parametrize("eval_size", [1, 2, 255, 256])
def test_arithmetic_is_every_pair_once_and_holds_out_both_orders_of_a_sum(eval_size: int) -> None:
    task = build_task(TaskConfig(eval_size=eval_size))
    held = pairs(task.heldout)
    assert len(held) == eval_size
    assert sorted(held) == sorted((b, a) for a, b in held)
    assert sorted([*pairs(task.train), *held]) == [(a, b) for a in range(10, 100) for b in range(10, 100)]
    assert task.rewards == ("exact_match",)
    assert build_task(TaskConfig(eval_size=eval_size)) == task, "the split is fixed"


@pytest.mark.parametrize(("template", "reverse"), [("{a}+{b}=", True), ("What is {a} + {b}?", False)])
def test_arithmetic_prompts_and_answers(template: str, reverse: bool) -> None:
    task = build_task(TaskConfig(reverse_answer=reverse, prompt_template=None if reverse else template))
    for problem, (a, b) in zip(task.heldout, pairs(task.heldout), strict=True):
        assert problem.prompt == template.format(a=a, b=b)
        assert problem.answer == str(a + b)[:: -1 if reverse else 1]


@pytest.mark.parametrize("digits", [1, 3, 4])
def test_arithmetic_of_other_sizes(digits: int) -> None:
    task = build_task(TaskConfig(digits=digits, eval_size=20))
    drawn = pairs([*task.train, *task.heldout])
    assert len(set(drawn)) == len(drawn)
    assert len(task.heldout) == 20
    assert {len(str(number)) for pair in drawn for number in pair} == {digits}
    assert len(drawn) == 81 if digits == 1 else len(drawn) > 50_000


# ---- GSM8K ----


def test_gsm8k_from_a_folder(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"{i} * 1000 = {i},000\n#### {i},000"} for i in range(1, 7)]
    jsonl(tmp_path / "train.jsonl", *rows)
    jsonl(tmp_path / "test.jsonl", *rows[:4])
    task = build_task(TaskConfig(name="gsm8k", path=str(tmp_path), eval_size=3))
    assert (len(task.train), task.rewards) == (6, ("gsm8k",))
    assert (task.train[0].prompt, task.train[0].answer, task.train[0].columns) == ("q1", "1,000", rows[0])
    assert [p.prompt for p in task.heldout] == ["q1", "q2", "q3"]


def test_gsm8k_whole() -> None:
    if not GSM8K.is_dir():
        pytest.skip(f"no GSM8K at {GSM8K}; set OVERLAPRL_GSM8K to a folder with train.jsonl and test.jsonl")
    task = build_task(TaskConfig(name="gsm8k", path=str(GSM8K), eval_size=2000))
    assert (len(task.train), len(task.heldout)) == (7473, 1319)
    assert all(extract_gsm8k_answer(p.answer) == p.answer.replace(",", "") for p in [*task.train, *task.heldout])


def test_gsm8k_wants_its_own_format(tmp_path: Path) -> None:
    jsonl(tmp_path / "test.jsonl", {"question": "q", "answer": "#### 1"})
    jsonl(tmp_path / "train.jsonl", {"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "no mark, 5"})
    with pytest.raises(ConfigError, match=r"task\.path: .*train\.jsonl, line 2 .*####.*task\.name records"):
        build_task(TaskConfig(name="gsm8k", path=str(tmp_path)))
    (tmp_path / "test.jsonl").unlink()
    jsonl(tmp_path / "train.jsonl", {"question": "q", "answer": "#### 1"})
    with pytest.raises(ConfigError, match=r"task\.path: .* no test split; give a folder with train\.jsonl and test"):
        build_task(TaskConfig(name="gsm8k", path=str(tmp_path)))


# ---- Records ----


def test_records_split_off_a_fixed_fifth_at_most(tmp_path: Path) -> None:
    config = TaskConfig(name="records", path=jsonl(tmp_path / "data.jsonl", *questions(20)))
    task = build_task(config)
    assert (len(task.train), len(task.heldout), task.rewards) == (16, 4, ("math",))
    assert sorted(int(p.answer) for p in [*task.train, *task.heldout]) == list(range(20))
    assert build_task(config) == task
    assert len(build_task(config.model_copy(update={"eval_size": 3})).heldout) == 3
    two = build_task(TaskConfig(name="records", path=jsonl(tmp_path / "two.jsonl", *questions(2))))
    assert (len(two.train), len(two.heldout)) == (1, 1)


def test_records_eval_path_before_test_split_before_validation_split(tmp_path: Path) -> None:
    jsonl(tmp_path / "set" / "train.jsonl", *questions(10))
    for start, name in ((300, "set/validation.jsonl"), (100, "set/test.jsonl"), (200, "other.jsonl")):
        path = jsonl(tmp_path / name, *questions(5, start=start))
        given = {"eval_path": path} if name == "other.jsonl" else {}
        task = build_task(TaskConfig(name="records", path=str(tmp_path / "set"), eval_size=2, **given))
        assert ([p.answer for p in task.heldout], len(task.train)) == ([str(start), str(start + 1)], 10)


ROWS = [{"question": "one,\ntwo", "answer": "007"}, {"question": "three", "answer": "1.50"}]


def write_csv(path: Path) -> None:
    path.write_text('\ufeffquestion,answer\r\n"one,\ntwo",007\r\nthree,1.50\r\n', encoding="utf-8", newline="")


def write_parquet(path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS), encoding="utf-8")


def write_jsonl(path: Path) -> None:
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, ROWS)), encoding="utf-8")


@pytest.mark.parametrize(
    ("write", "suffix"),
    [(write_csv, "csv"), (write_parquet, "parquet"), (write_json, "json"), (write_jsonl, "jsonl"),
     (write_jsonl, "json"), (write_json, "jsonl")],
)  # fmt: skip
def test_records_read_every_format_alike(tmp_path: Path, write: Callable[[Path], None], suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    write(path)
    task = build_task(TaskConfig(name="records", path=str(path), eval_path=str(path)))
    assert [(p.prompt, p.answer) for p in task.train] == [("one,\ntwo", "007"), ("three", "1.50")]
    assert task.heldout == task.train


@pytest.mark.parametrize(
    ("written", "answer"),
    [("0.00001", "0.00001"), ("1e22", "1" + "0" * 22), ("-1.50", "-1.5"), ("3.0", "3.0"), ("7", "7"),
     ("0.1000000000000000000001", "0.1000000000000000000001"), ("1e999", None), ("NaN", None), ("-Infinity", None)],
)  # fmt: skip
def test_numbers_keep_their_decimal_form(tmp_path: Path, written: str, answer: str | None) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"question": "q", "answer": 1}}\n{{"question": "q", "answer": {written}}}')
    config = TaskConfig(name="records", path=str(path), eval_path=str(path))
    if answer is None:
        with pytest.raises(ConfigError, match=r"'answer' is -?(inf|nan) in .*line 2; make it a text or a number"):
            build_task(config)
    else:
        assert build_task(config).train[1].answer == answer


SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
REPLIED = {"role": "assistant", "content": "2"}
MORE = {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "2+2?"}]}


@pytest.mark.parametrize(
    ("column", "turns", "settings", "expected"),
    [
        ("prompt", [ASKED], {}, [ASKED]),
        ("messages", [SYSTEM, ASKED, REPLIED], {}, [SYSTEM, ASKED]),
        ("messages", [ASKED, REPLIED, MORE, REPLIED], {}, [ASKED, REPLIED, {**MORE, "content": "And 2+2?"}]),
        ("chat", [ASKED], {"question_column": "chat"}, [ASKED]),
        ("chat", [SYSTEM, ASKED], {"question_column": "chat", "prompt_template": "{question} ({extra[unit]})"},
         [SYSTEM, {**ASKED, "content": "1+1? (cm)"}]),
    ],
)  # fmt: skip
def test_turns_are_asked_up_to_the_last_users(
    tmp_path: Path, column: str, turns: list[Any], settings: dict[str, Any], expected: list[Any]
) -> None:
    row = {column: turns, "extra": {"unit": "cm", "truth": {"value": 0.5}}, "extra.truth": "a name with a dot"}
    path = jsonl(tmp_path / "data.jsonl", row)
    config = TaskConfig(name="records", path=path, eval_path=path, answer_column="extra.truth.value", **settings)
    [problem] = build_task(config).train
    assert (problem.asked, problem.prompt, problem.answer) == (expected, expected[-1]["content"], "0.5")
    assert problem.reply("4") == [{"role": "assistant", "content": "4"}]
    assert problem.columns == row


def test_records_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    extra: dict[str, list[dict[str, Any]]] = {}

    def load_dataset(name: str, configuration: str | None) -> dict[str, list[dict[str, Any]]]:
        asked.append((name, configuration))
        return {"train": questions(8), "validation": questions(3, start=50), **extra}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = build_task(TaskConfig(name="records", path="someone/numbers:small"))
    assert asked == [("someone/numbers", "small")]
    assert (len(task.train), [p.answer for p in task.heldout]) == (8, ["50", "51", "52"])
    extra["test"] = questions(1, start=70)
    assert [p.answer for p in build_task(TaskConfig(name="records", path="someone/numbers")).heldout] == ["70"]
    assert asked[-1] == ("someone/numbers", None)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        ConfigError, match=r"task\.path: 'openai/gsm8k:main' .*ConnectionError: no route\); give a local"
    ):
        build_task(TaskConfig(name="gsm8k"))


def test_template_columns_and_rewards(tmp_path: Path) -> None:
    rows = [{"problem": "{x} + 1", "topic": "sums", "solution": 3.0}] * 2  # duplicates are allowed; braces in data stay
    config = TaskConfig(
        name="records",
        path=jsonl(tmp_path / "data.jsonl", *rows),
        prompt_template=r"{topic}: {problem} Answer in \boxed{{}}.",
        answer_column="solution",
        rewards=["gsm8k", "boxed_format"],
    )
    task = build_task(config)
    assert task.rewards == ("gsm8k", "boxed_format")
    assert task.train[0] == Problem(r"sums: {x} + 1 Answer in \boxed{}.", "3.0", rows[0])
    columns = columns_of([*task.train, *task.heldout])
    assert columns == {"answer": ["3.0"] * 2, "problem": ["{x} + 1"] * 2, "topic": ["sums"] * 2, "solution": [3.0] * 2}
    total, _ = score(load_rewards(task.rewards), None, ["?", "?"], [r"\boxed{3}", "4"], columns)
    assert total == [2.0, 0.0]


def test_columns_never_clash_with_what_rewards_are_called_with() -> None:
    rows = [Problem("p", "3", {"answer": "#### 3", "prompts": 1, "completions": 2, "level": 4}), Problem("q", "5", {})]
    assert columns_of(rows) == {"answer": ["3", "5"], "level": [4, None]}


# ---- Bad input: the field, the value, the remedy ----

GOOD = {"question": "q", "answer": "1"}


@pytest.mark.parametrize(
    ("content", "settings", "said"),
    [
        ("", {}, ["task.path", "data.jsonl has no rows", "at least one problem"]),
        ('{"question": "q", "answer": 1}\n\n{"question"\n', {}, ["task.path", "data.jsonl", "line 3 is not JSON"]),
        ('[1, 2]\n', {}, ["task.path", "item 1", "holds 1", "object"]),
        (b'\xff\xfe{}', {}, ["task.path", "data.jsonl cannot be read", "another .jsonl"]),
        ([GOOD, {"q": "q", "answer": 1}], {}, ["task.question_column", "'question'", "line 2", "q, answer"]),
        ([{"question": "q", "a": 1}], {}, ["task.answer_column", "'answer'", "line 1", "question, a"]),
        ([GOOD] * 2, {"answer_column": "gold"}, ["task.answer_column", "'gold'", "question, answer"]),
        ([{"question": "q", "answer": None}], {}, ["task.answer_column", "None", "line 1", "text or a number"]),
        ([{"question": "q", "answer": [1]}], {}, ["task.answer_column", "[1]", "line 1", "text or a number"]),
        ([{"question": "q", "answer": True}], {}, ["task.answer_column", "True", "line 1", "text or a number"]),
        ([{"question": "q", "answer": " "}], {}, ["task.answer_column", "' '", "line 1", "text or a number"]),
        ([{"question": {}, "answer": 1}], {}, ["task.question_column", "{}", "line 1", "text or a number"]),
        ([{"question": "", "answer": 1}], {}, ["task.question_column", "''", "line 1"]),
        ([GOOD] * 2, {"prompt_template": "{problem}"}, ["task.prompt_template", "'{problem}'", "line ", "{question}"]),
        ([GOOD] * 2, {"prompt_template": r"{question} \boxed{}"}, ["task.prompt_template", r"\boxed{{}}"]),
        ([GOOD] * 2, {"prompt_template": "{question"}, ["task.prompt_template", "'{question'", "expected '}'"]),
        ([GOOD] * 2, {"prompt_template": " "}, ["task.prompt_template", "' '", "empty prompt"]),
        ([{"prompt": [SYSTEM], "answer": 1}], {}, ["task.question_column", "line 1", "no user turn"]),
        ([{"prompt": [ASKED, {"from": "gpt"}], "answer": 1}], {}, ["task.question_column", "role and content"]),
        ([{"prompt": [SYSTEM, ASKED], "answer": 1}], {"system_prompt": "x"}, ["task.system_prompt", "line 1", "null"]),
        ([{"question": "q", "a": {"b": 1}}], {"answer_column": "a.c"}, ["task.answer_column", "'a.c'", "a, a.b"]),
        ([GOOD], {}, ["task.path", "one row", "task.eval_path"]),
        ([GOOD, {"question": "q\ud800", "answer": "2"}], {}, ["data.jsonl, line 2 holds text that is no Unicode"]),
        ([GOOD] * 2, {"eval_path": "nowhere.jsonl"}, ["task.eval_path", "nowhere.jsonl", ".parquet"]),
    ],
)  # fmt: skip
def test_bad_records(tmp_path: Path, content: Any, settings: dict[str, Any], said: list[str]) -> None:
    path = tmp_path / "data.jsonl"
    if isinstance(content, list):
        jsonl(path, *content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        build_task(TaskConfig(name="records", path=str(path), **settings))
    assert [part for part in said if part not in str(error.value)] == [], str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '{"data": []}', "no column 'question'"),
        ("a.json", "[", "cannot be read (line 1 is not JSON: Expecting value"),
        ("a.json", "[1]", "item 1 holds 1"),
        ("a.parquet", "question", "cannot be read"),
        ("a.csv", "question,answer\n", "no rows"),
        ("a.csv", "question,answer\nq\n", "'answer' is None"),
        ("a.csv", "question,answer\n1, 2 or 3?,2\n", "line 2 has more cells than the first; put quotes around commas"),
        ("a.txt", "question", "no file"),
    ],
)
def test_bad_files_of_other_formats(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        build_task(TaskConfig(name="records", path=str(tmp_path / name)))
    assert str(tmp_path / name) in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("path", ["missing.jsonl", "./missing", "/missing/folder/file", "owner/missing.csv", "missing"])
def test_a_path_that_is_not_there(path: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.path: no file .*missing.*; give the path of a"):
        build_task(TaskConfig(name="records", path=path))


def test_other_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path: nothing given; task records needs"):
        build_task(TaskConfig(name="records"))
    with pytest.raises(ConfigError, match=r"task\.path: .* has no train file; name it train\.jsonl"):
        build_task(TaskConfig(name="records", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"task\.eval_size: 81 leaves nothing .*81 problems.*task\.digits 1; make it"):
        build_task(TaskConfig(digits=1, eval_size=81))
