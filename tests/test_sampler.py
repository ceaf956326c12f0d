"""Batches as functions of (config, seed, batch): shares, evaluation, and rewards that hang or leave."""

import dataclasses
import json
import math
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import policy_of, small
from tokenizers.processors import TemplateProcessing

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.tiny import tiny_tokenizer
from overlaprl_ray.rollout import merge, rows_of
from overlaprl_ray.tasks import build_task
from overlaprl_ray.workers.build import build_sampler
from overlaprl_ray.workers.generator import check_prompts, encode
from overlaprl_ray.workers.metrics import rollout_metrics, samples_of
from overlaprl_ray.workers.watchdog import take_timeout, time_limit


def sampler_of(config, share=(0, 1)):
    task = build_task(config.task)
    sampler = build_sampler(config, task, policy_of(config, task), share=share)
    sampler.engine.version = 0
    return sampler


@pytest.mark.parametrize("count", [2, 3, 4])
def test_generators_share_a_batch_by_whole_groups_with_the_same_text(count):
    config = small()
    whole = sampler_of(config).rollout(3, 2)
    merged = merge([sampler_of(config, (index, count)).rollout(3, 2) for index in range(count)])
    assert merged.completions == whole.completions
    assert merged.prompts == whole.prompts
    for name in ("rewards", "advantages", "groups", "completion_ids", "prompt_ids", "finished"):
        assert torch.equal(getattr(merged, name), getattr(whole, name)), name
    assert (merged.logprobs - whole.logprobs).abs().max() < 1e-4


def test_a_batch_is_a_function_of_seed_and_number():
    config = small()
    sampler = sampler_of(config)
    first = sampler.rollout(1, 0)
    other = sampler.rollout(2, 0)
    again = sampler.rollout(1, 0)
    assert first.completions == again.completions
    assert torch.equal(first.logprobs, again.logprobs)
    assert first.prompts != other.prompts
    seeded = sampler_of(config.model_copy(update={"seed": 1})).rollout(1, 0)
    assert seeded.completions != first.completions


def test_groups_go_by_position_even_where_prompts_are_the_same(monkeypatch):
    config = small()
    sampler = sampler_of(config)
    one = sampler.task.train[0]
    monkeypatch.setattr("overlaprl_ray.workers.generator.prompts_of_batch", lambda *_: [one] * 4)
    rollout = sampler.rollout(1, 0)
    assert rollout.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert len(set(rollout.completions)) > 4
    grouped = rollout.advantages.reshape(4, 4)
    assert grouped.sum(1).abs().max() < 1e-5


def leaves(prompts, completions, answer, **columns):
    """Would end the program."""
    raise SystemExit("enough")


def test_a_reward_that_leaves_is_named():
    with pytest.raises(RunError, match=r"batch 1: .*SystemExit: enough"):
        sampler_of(small(task={"rewards": ["test_sampler:leaves"]})).rollout(1, 0)


HANGS = {
    "waits": "time.sleep(60)",
    "goes on whatever is raised": """
while True:
    try: time.sleep(60)
    except BaseException: pass""",
    "holds the interpreter": "re.match('(a+)+$', 'a' * 60 + 'b')",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_process_that_scores_for_too_long_ends_and_says_why(hang, tmp_path):
    body = textwrap.indent(HANGS[hang].strip(), "    ")
    code = "import re, sys, time\nfrom pathlib import Path\nfrom overlaprl_ray.workers.watchdog import time_limit\n"
    code += f"with time_limit(0.3, 'batch 1: too long', Path(sys.argv[1]), '0'):\n{body}\n"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == RunError.exit_code
    assert time.monotonic() - started < 20
    assert done.stderr == ("" if hang == "holds the interpreter" else "error: batch 1: too long\n")
    assert take_timeout(tmp_path) == "batch 1: too long"
    assert take_timeout(tmp_path) is None


def test_a_process_that_was_killed_while_it_scored_did_not_take_too_long(tmp_path):
    with time_limit(60, "batch 1: too long", tmp_path, "0"):
        (left,) = tmp_path.iterdir()
        killed = left.read_text()
    assert list(tmp_path.iterdir()) == []
    left.write_text(killed)
    assert take_timeout(tmp_path) is None


TURNS = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]


def conversation(tmp_path, rewards, **row):
    """A sampler on one problem, asked as turns, whose completions are `texts`."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": TURNS, "answer": "2", **row}) + "\n")
    task = {"name": "records", "path": str(path), "eval_path": str(path), "rewards": rewards, "eval_size": 2}
    sampler = sampler_of(small(task=task, grpo={"num_prompts_per_step": 1, "group_size": 4}))
    sampler.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
    return sampler


def test_rewards_of_trl_run_unchanged_on_conversations(tmp_path, monkeypatch):
    """think_format_reward and accuracy_reward index completions as messages; the second abstains without a solution."""
    rewards = [f"trl.rewards:{name}" for name in ("think_format_reward", "accuracy_reward")]
    texts = [r"<think>2</think>\boxed{2}", r"\boxed{2}", r"<think>3</think>\boxed{3}", "2"]
    for solution, right in (("$2$", [1.0, 1.0, 0.0, 0.0]), ("", [math.nan] * 4)):
        sampler = conversation(tmp_path, rewards, solution=solution)
        monkeypatch.setattr(sampler, "_read", lambda out: (out.ids.tolist(), texts))
        rollout = sampler.rollout(1, 0)
        think, accuracy = rollout.reward_parts.values()
        assert think.tolist() == [1.0, 0.0, 1.0, 0.0]
        assert repr(accuracy.tolist()) == repr(right)
        assert rollout.rewards.tolist() == [1 + right[0], right[1], 1.0, 0.0] if solution else think.tolist()
        assert rollout.logged["answer_parsed"][3] == ("[unparseable]" if solution else "[skipped]")


def fussy(prompts, completions, answer, completion_ids, trainer_state, log_extra, log_metric):
    """Judges the first two completions of a group, and none in evaluation; says what it was called with."""
    assert prompts == [TURNS] * len(prompts)
    assert [len(message) for message in completions] == [1] * len(prompts)
    log_extra("ids", completion_ids)
    log_metric("step", trainer_state.global_step)
    return [float(row) if row < 2 < len(prompts) else None for row in range(len(prompts))]


def test_rows_that_nobody_judged_are_no_part_of_their_group(tmp_path):
    sampler = conversation(tmp_path, ["test_sampler:fussy"])
    rollout = sampler.rollout(3, 2)
    assert sampler.tokenizer.decode(rollout.prompt_ids[0]) == "system:Think.;user:1+1?;a:"
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert rollout.rewards.isnan().tolist() == [False, False, True, True]
    assert rollout.advantages.tolist() == pytest.approx([-expected, expected, 0, 0])
    assert sampler.evaluate() == (0.0, 1)
    metrics = rollout_metrics(rollout, 4)
    assert (metrics["reward"], metrics["rewards/test_sampler:fussy/mean"], metrics["logged/step"]) == (0.5, 0.5, 2)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5))
    rows = samples_of(rollout, 1, 4)
    assert [row["reward"] for row in rows] == [0.0, 1.0, None, None]
    tokens = [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)]
    assert [row["logged"] for row in rows] == [{"ids": str(row), "step": 2.0} for row in tokens]
    one, other = rows_of(rollout, slice(0, 2)), dataclasses.replace(rows_of(rollout, slice(2, 4)), logged={})
    assert merge([one, other]).logged == {"ids": [*map(str, tokens[:2]), None, None], "step": [2.0, 2.0, None, None]}


def ends_texts(tokenizer):
    """The tokenizer with an EOS after each text, as `add_eos_token` has it."""
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    return tokenizer


def test_an_eos_that_the_tokenizer_adds_is_no_part_of_a_prompt():
    plain, tokenizer = tiny_tokenizer(), ends_texts(tiny_tokenizer())
    for text in ("1+2=", "12+34="):
        assert tokenizer(text)["input_ids"] == [*plain(text)["input_ids"], plain.eos_token_id]
        assert encode(tokenizer, text, None) == plain(text)["input_ids"]
    config = small()
    task = build_task(config.task)
    (notice,) = check_prompts(config, task, tokenizer).notices
    assert "add_eos_token" in notice
    assert check_prompts(config, task, plain) is task


def test_what_a_model_would_not_see_of_a_prompt_is_refused():
    config, tokenizer = small(task={"system_prompt": "Be brief."}), tiny_tokenizer()
    task = build_task(config.task)
    for template in (None, "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=r"task\.system_prompt = 'Be brief\.': 'tiny' would not see it"):
            check_prompts(config, task, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert check_prompts(config, task, tokenizer) is task
    assert tokenizer.decode(encode(tokenizer, TURNS, None)) != tokenizer.decode(encode(tokenizer, TURNS[1:], None))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template for .*Think.*; use a model with one"):
        encode(tokenizer, TURNS, None)


@pytest.mark.parametrize(("skip", "expected"), [(True, ["12", "12", ""]), (False, ["12", "1<unk>2", "<unk>"])])
def test_special_tokens_are_read_where_that_is_set(skip, expected):
    sampler = sampler_of(small(task={"skip_special_tokens": skip}))
    tokenizer = sampler.tokenizer
    one, two = tokenizer("12")["input_ids"]
    special, eos = tokenizer.unk_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[one, two, eos, eos], [one, special, two, eos], [special, eos, eos, eos]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    out = SimpleNamespace(ids=ids, mask=mask, finished=torch.tensor([True, True, False]))
    assert sampler._read(out)[1] == expected


def test_accuracy_is_the_share_of_full_marks_of_the_first_reward():
    config = small(task={"rewards": ["test_sampler:half", "exact_match"], "eval_size": 16})
    assert sampler_of(config).evaluate() == (0.5, 16)


def half(prompts, completions, answer, **columns):
    """Full marks for every second completion, a little less for the others."""
    return [1.0 if row % 2 else 0.9 for row in range(len(completions))]


def test_chat_template_and_system_prompt_are_applied_where_there_is_a_template():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(encode(tokenizer, "1+2=", "Be brief.")) == "1+2="
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
    assert tokenizer.decode(encode(tokenizer, "1+2=", "Be brief.")) == "system:Be brief.;user:1+2=;a:"
    assert tokenizer.decode(encode(tokenizer, "1+2=", None)) == "user:1+2=;a:"
