"""Batches as functions of (config, seed, batch): shares, evaluation, and rewards that hang or leave."""

import time

import pytest
import torch
from conftest import policy_of, small

from overlaprl_ray.errors import RunError
from overlaprl_ray.models.tiny import tiny_tokenizer
from overlaprl_ray.rollout import merge
from overlaprl_ray.tasks import build_task
from overlaprl_ray.workers.build import build_sampler
from overlaprl_ray.workers.generator import encode


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


def hangs(prompts, completions, answer, **columns):
    """Longer than anybody waits."""
    time.sleep(30)


def leaves(prompts, completions, answer, **columns):
    """Would end the program."""
    raise SystemExit("enough")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [("hangs", r"batch 1: .*reward_timeout_s = 0.5 s .*prompt"), ("leaves", "batch 1: .*SystemExit: enough")],
)
def test_a_reward_that_hangs_or_leaves_is_named(reward, expected):
    sampler = sampler_of(small(task={"rewards": [f"test_sampler:{reward}"], "reward_timeout_s": 0.5}))
    with pytest.raises(RunError, match=expected):
        sampler.rollout(1, 0)


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
