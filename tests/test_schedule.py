"""The schedule as arithmetic, and driven at random: whatever finishes first, the plan holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaprl_ray.algorithm.schedule import Schedule, evaluations, last_startable
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
