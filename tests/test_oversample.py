"""Dynamic sampling: which groups a batch is made of, and that what is left out counts in every total."""

import pytest
import torch
from conftest import make_rollout, policy_of, small
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.rollout import batch_of, merge
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.tasks import build_task
from overlaprl_ray.workers.build import build_sampler
from overlaprl_ray.workers.metrics import rollout_metrics


def rollout_of(signals: list[bool]):
    """A group of two rows for each entry, the second row two tokens longer; rewards differ where there is signal."""
    rows = 2 * len(signals)
    mask = torch.arange(4) < torch.tensor([1, 3] * len(signals))[:, None]
    rewards = torch.tensor([float(row % 2) if signals[row // 2] else 1.0 for row in range(rows)])
    advantages = torch.tensor([(2.0 * (row % 2) - 1) * signals[row // 2] for row in range(rows)])
    made = Generated(torch.ones(rows, 4, dtype=torch.long), mask, torch.zeros(rows, 4), mask.any(1))
    return make_rollout([[1]] * rows, made, rewards=rewards, advantages=advantages)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_the_first_groups_with_signal_then_those_without(signals, count):
    whole = rollout_of(signals)
    picked = batch_of([whole], count)
    with_signal = [group for group, signal in enumerate(signals) if signal]
    without = [group for group, signal in enumerate(signals) if not signal]
    expected = sorted([*with_signal, *without][:count])
    assert picked.groups.tolist() == [group for group in expected for _ in range(2)]
    assert torch.equal(picked.rewards, whole.rewards[torch.isin(whole.groups, torch.tensor(expected))])
    metrics, all_of_it = rollout_metrics(picked, 2), rollout_metrics(whole, 2)
    for name in ("tokens", "samples", "reward", "frac_reward_zero_std"):
        assert metrics[name] == pytest.approx(all_of_it[name]), name
    assert metrics["tokens_unused"] == 4 * (len(signals) - len(expected))


def test_shares_and_order_of_prompts():
    """1.5 times 4 prompts, by one generator or three; batch 2 goes on where batch 1 ended."""
    config = small(grpo={"oversample": 1.5})
    task = build_task(config.task)

    def batch(number: int, count: int):
        samplers = [
            build_sampler(config, task, policy_of(config, task), share=(index, count)) for index in range(count)
        ]
        return [sampler.rollout(number, 0) for sampler in samplers]

    first, second = merge(batch(1, 1)), merge(batch(2, 3))
    assert first.groups.unique().tolist() == list(range(6))
    assert merge(batch(2, 1)).completions == second.completions
    assert not {*first.prompts} & {*second.prompts}
    assert len(batch_of([second], 4).rewards) == 16


def test_a_run_trains_on_more_signal_and_counts_all_tokens():
    rows = {factor: replay(small(grpo={"oversample": factor, "num_steps": 6}))[0] for factor in (1.0, 2.0)}
    for row in rows[2.0]:
        assert row["samples"] == 32
        assert 0 < row["tokens_unused"] < row["tokens"]
    assert all(row["tokens_unused"] == 0 and row["samples"] == 16 for row in rows[1.0])
    skipped = {factor: sum(row["rows_skipped"] for row in made) for factor, made in rows.items()}
    assert skipped[2.0] <= skipped[1.0]
