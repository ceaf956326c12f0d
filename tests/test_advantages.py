"""Group advantages against the formula written as a loop, and their traps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlaprl_ray.algorithm.advantages import group_advantages


def naive(rewards: list[float], group_size: int, scale: bool, eps: float = 1e-4) -> list[float]:
    advantages = []
    for i, reward in enumerate(rewards):
        first = i - i % group_size
        group = rewards[first : first + group_size]
        mean = math.fsum(group) / group_size
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (group_size - 1))
        advantages.append((reward - mean) / (std + eps) if scale else reward - mean)
    return advantages


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_equals_the_formula(group_size: int, scale: bool) -> None:
    rewards = torch.randn(5 * group_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = float64(naive(rewards.tolist(), group_size, scale))
    torch.testing.assert_close(group_advantages(rewards, group_size, scale), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [True, False])
def test_rows_that_nobody_judged_are_left_out(scale: bool) -> None:
    nan, judged = math.nan, [0.0, 2.0, 5.0, 1.0, 3.0]
    rewards = float64([0.0, nan, 2.0, 5.0, nan, nan, 4.0, nan, nan, nan, nan, nan, 1.0, 3.0, nan, nan])
    three, two = naive(judged[:3], 3, scale), naive(judged[3:], 2, scale)
    expected = [three[0], 0, *three[1:], 0, 0, 0, 0, 0, 0, 0, 0, *two, 0, 0]
    torch.testing.assert_close(group_advantages(rewards, 4, scale), float64(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
@pytest.mark.parametrize(
    "rewards",
    [[1.0] * 4, [0.1] * 7, [0.1 + 0.2] * 6, [0.1 + 0.2, 0.3, 0.3], [1 / 3 + 1 / 3 + 1 / 3, 1.0], [-1e6 / 3] * 3],
)
def test_equal_rewards_give_exactly_zero(rewards: list[float], eps: float, dtype: torch.dtype) -> None:
    advantages = group_advantages(torch.tensor(rewards, dtype=dtype), len(rewards), eps=eps)
    assert advantages.tolist() == [0.0] * len(rewards)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.booleans())
def test_any_repeated_reward_gives_exactly_zero(reward: float, group_size: int, scale: bool) -> None:
    assert not group_advantages(float64([reward] * group_size), group_size, scale).any()


@pytest.mark.parametrize("scale", [True, False])
def test_small_differences_are_signal(scale: bool) -> None:
    assert (group_advantages(torch.tensor([1.0, 1.001]), 2, scale) != 0).all()


def test_a_flat_group_leaves_its_neighbours_alone() -> None:
    advantages = group_advantages(float64([1, 1, 0, 1]), 2)
    assert advantages[:2].tolist() == [0, 0]
    assert advantages[2:].tolist() == pytest.approx(naive([0, 1], 2, True))


def test_groups_go_by_position_even_when_prompts_repeat() -> None:
    """Two copies of one prompt: pooling their four rows would give the rows of the second copy an advantage."""
    rewards = float64([0, 1, 1, 1])
    assert group_advantages(rewards, 2, scale=False).tolist() == [-0.5, 0.5, 0, 0]
    assert group_advantages(rewards, 4, scale=False).tolist() == [-0.75, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("group_size", [1, 0, -2])
def test_a_group_needs_siblings(group_size: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.ones(4), group_size)


@pytest.mark.parametrize("shape", [(5,), (2, 2)])
def test_groups_are_whole(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="whole adjacent groups"):
        group_advantages(torch.ones(shape), 2)
