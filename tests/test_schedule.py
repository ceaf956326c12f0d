"""The schedule as arithmetic, and driven at random: whatever finishes first, the plan holds."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from overlaprl_ray.algorithm.schedule import Schedule, evaluations, last_startable, learning_rate, seeded_uniform
from overlaprl_ray.config import GRPOConfig
from overlaprl_ray.runtime.queue import RolloutQueue, Ticket


def test_weights_step_by_hand():
    assert [Schedule(0).weights_step(batch) for batch in (1, 2, 3)] == [0, 1, 2]
    assert [Schedule(2).weights_step(batch) for batch in range(1, 7)] == [0, 0, 0, 1, 2, 3]


def test_evaluations_by_hand():
    assert evaluations(10, 0) == [0, 10]
    assert evaluations(10, 4) == [0, 4, 8, 10]
    assert evaluations(3, 50) == [0, 3]
    assert evaluations(4, 2) == [0, 2, 4]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 6), st.integers(1, 40), st.booleans(), st.data())
def test_any_order_of_events_keeps_the_plan(lag, num_steps, exact, data):
    """One generator, one learner; at each turn chance says whose work ends, and whether the batch is discarded."""
    finished, started, made = 0, 0, []
    generating: tuple[int, int] | None = None
    version_after = {0: 0}
    trained: list[int] = []
    while finished < num_steps:
        if generating is None and started < last_startable(finished, lag, num_steps):
            started += 1
            generating = (started, Schedule(lag).weights_step(started) if exact else finished)
            assert generating[1] in version_after, "weights that do not exist yet"
        choices = ["generate"] * (generating is not None) + ["train"] * bool(made)
        assert choices, "deadlock"
        if data.draw(st.sampled_from(choices)) == "generate":
            assert generating is not None
            made.append(generating)
            generating = None
            assert len(made) <= lag + 1
        else:
            batch, source = made.pop(0)
            assert batch == finished + 1
            assert not Schedule(lag).is_too_old(batch, source)
            if exact:
                assert source == max(0, batch - 1 - lag)
            else:
                assert source >= max(0, batch - 1 - lag)
            finished = batch
            trained.append(batch)
            version_after[batch] = version_after[batch - 1] + data.draw(st.integers(0, 1))  # 0: discarded
    assert trained == list(range(1, num_steps + 1))


def test_is_too_old_at_the_bound():
    assert not Schedule(2).is_too_old(5, 2)
    assert Schedule(2).is_too_old(5, 1)


def ticket(batch):
    return Ticket(batch, 0, [], None)


def test_queue_is_bounded_ordered_and_first_in_first_out():
    queue = RolloutQueue(capacity=2)
    assert queue.newest is None
    queue.put(ticket(1))
    queue.put(ticket(2))
    assert queue.full
    with pytest.raises(ValueError, match="full"):
        queue.put(ticket(3))
    assert queue.pop().batch == 1
    with pytest.raises(ValueError, match="cannot follow"):
        queue.put(ticket(4))
    queue.put(ticket(3))
    assert (queue.head.batch, queue.newest.batch, len(queue)) == (2, 3, 2)


# ---- the learning rate


def rates(num_steps, **settings):
    grpo = GRPOConfig(num_steps=num_steps, lr=0.02, **settings)
    return [learning_rate(step, grpo) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.005, 0.01, 0.015, 0.02, 0.02, 0.02, 0.02, 0.02]),
        ("linear", [0.005, 0.01, 0.015, 0.02, 0.02, 0.0155, 0.011, 0.0065]),
        ("cosine", [0.005, 0.01, 0.015, 0.02, 0.02, 0.011 + 0.009 * math.sqrt(0.5), 0.011, 0.011 - 0.009 * 0.5**0.5]),
    ],
)
def test_learning_rate_by_hand(schedule, expected):
    """Warm-up of 4 steps, then from .02 towards .002 in quarters."""
    assert rates(8, lr_warmup_steps=4, lr_schedule=schedule, lr_min_ratio=0.1) == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_a_constant_rate_is_what_it_says():
    assert rates(5, lr_warmup_steps=0) == [0.02] * 5
    assert rates(3, lr_warmup_steps=6) == pytest.approx([0.02 / 6, 0.04 / 6, 0.06 / 6], rel=1e-12)  # never done


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_after_warm_up_it_is_hugging_faces_schedule(schedule, warmup):
    """Theirs begins its warm-up at 0, so that the first step would do nothing; ours does not."""
    name = "constant_with_warmup" if schedule == "constant" else schedule
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    theirs = get_scheduler(name, adamw, num_warmup_steps=warmup, num_training_steps=30)
    expected = []
    for _ in range(30):
        expected.append(theirs.get_last_lr()[0])
        adamw.step()
        theirs.step()
    ours = rates(30, lr_warmup_steps=warmup, lr_schedule=schedule)
    assert ours[warmup:] == pytest.approx(expected[warmup:], rel=1e-9, abs=1e-15)
    assert ours[: max(0, warmup - 1)] == pytest.approx(expected[1:warmup], rel=1e-9)  # one step ahead


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 30), st.integers(1, 60), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1))
def test_learning_rate_rises_to_the_peak_then_only_falls(warmup, num_steps, schedule, ratio):
    found = rates(num_steps, lr_warmup_steps=warmup, lr_schedule=schedule, lr_min_ratio=ratio)
    rising, falling = found[:warmup], found[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert all(0 < rate <= 0.02 for rate in rising)
    assert all(0.02 * ratio * (1 - 1e-12) <= rate <= 0.02 for rate in falling)
    assert not falling or falling[0] == 0.02  # continuous: the last step of warm-up has the peak, too
    assert len(rising) < warmup or not warmup or rising[-1] == 0.02


# ---- draws


def test_a_draw_follows_from_its_key_alone():
    keys = [(seed, batch, part) for seed in range(3) for batch in range(1, 400) for part in (0, 2, 16)]
    draws = [seeded_uniform(*key) for key in keys]
    assert draws == [seeded_uniform(*key) for key in keys]
    assert len(set(draws)) == len(draws)  # another seed, batch or update: another draw
    assert all(0 <= draw < 1 for draw in draws)
    for chance in (0.1, 0.5, 0.9):
        error = math.sqrt(chance * (1 - chance) / len(draws))
        assert abs(sum(draw < chance for draw in draws) / len(draws) - chance) < 3 * error
    pairs = list(zip(draws[::3], draws[3::3], strict=False))  # batches next to each other
    correlation = torch.corrcoef(torch.tensor(pairs, dtype=torch.float64).T)[0, 1]
    assert abs(float(correlation)) < 3 / math.sqrt(len(pairs))
