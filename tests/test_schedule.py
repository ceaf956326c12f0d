"""The schedule as arithmetic, and driven at random: whatever finishes first, the plan holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaprl_ray.algorithm.schedule import Schedule, evaluations, last_older_batch, older_sources
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
@given(st.integers(0, 6), st.integers(1, 40), st.sampled_from([None, 0, 5]), st.data())
def test_any_order_of_events_keeps_the_plan(lag, num_steps, late, data):
    """One generator, one learner; at each turn chance says whose work ends, and whether the batch is discarded."""
    exact = late is not None  # else the schedule `latest`
    schedule = Schedule(lag, 0.3, late or 0, seed=1)
    finished, started = 0, 0
    under_way = RolloutQueue(capacity=lag + 1)
    made: list[int] = []
    version_after = {0: 0}
    while finished < num_steps:
        generating = started > finished + len(made)
        if not generating and not under_way.full and started < num_steps:
            started += 1
            under_way.put(Ticket(started, schedule.weights_step(started) if exact else finished))
            generating = True
            assert under_way[-1].weights_step in version_after, "weights that do not exist yet, or were forgotten"
        choices = ["generate"] * generating + ["train"] * bool(made)
        assert choices, "deadlock"
        if data.draw(st.sampled_from(choices)) == "generate":
            made.append(started)
            continue
        ticket = under_way.popleft()
        assert ticket.batch == made.pop(0) == finished + 1
        assert not schedule.is_too_old(ticket.batch, ticket.weights_step)
        if exact:
            on_time = max(0, ticket.batch - 1 - lag)
            assert ticket.weights_step in (on_time, max(0, on_time - late))
        finished = ticket.batch
        version_after[finished] = version_after[finished - 1] + data.draw(st.integers(0, 1))  # 0: discarded
        oldest = schedule.oldest_step(started + 1) if exact else finished
        version_after = {step: version for step, version in version_after.items() if step >= oldest}
    assert started == num_steps
    assert not len(under_way)


@given(st.integers(0, 6), st.integers(1, 40), st.data())
def test_what_is_forgotten_is_never_asked_for_again(lag, num_steps, data):
    batch = data.draw(st.integers(1, num_steps))
    assert Schedule(lag).oldest_step(batch) == min(
        Schedule(lag).weights_step(later) for later in range(batch, num_steps + 1)
    )
    step = data.draw(st.integers(1, num_steps))
    older = [later for later in range(step + 1, num_steps + 1) if Schedule(lag).weights_step(later) < step]
    assert last_older_batch(step, lag, num_steps) == max(older, default=step)


def test_is_too_old_at_the_bound():
    assert not Schedule(2).is_too_old(5, 2)
    assert Schedule(2).is_too_old(5, 1)


def test_queue_is_bounded_ordered_and_first_in_first_out():
    queue = RolloutQueue(capacity=2)
    queue.put(Ticket(1, weights_step=0))
    queue.put(Ticket(2, weights_step=0))
    assert queue.full
    with pytest.raises(ValueError, match="full"):
        queue.put(Ticket(3, weights_step=0))
    assert queue.popleft().batch == 1
    with pytest.raises(ValueError, match="cannot follow"):
        queue.put(Ticket(4, weights_step=0))
    queue.put(Ticket(3, weights_step=0))
    assert [ticket.batch for ticket in queue] == [2, 3]


def test_late_batches_follow_from_seed_and_batch_alone():
    plan = [Schedule(1, 0.2, 11, seed=3).weights_step(batch) for batch in range(1, 2001)]
    late = [step < batch - 2 for batch, step in enumerate(plan, start=1)]
    assert plan == [Schedule(1, 0.2, 11, seed=3).weights_step(batch) for batch in range(1, 2001)]
    assert plan != [Schedule(1, 0.2, 11, seed=4).weights_step(batch) for batch in range(1, 2001)]
    assert {batch - 1 - step for batch, step in enumerate(plan, start=1) if batch > 13} == {1, 12}
    assert 0.17 < sum(late) / 2000 < 0.23


@pytest.mark.parametrize(
    ("step", "lag", "num_steps", "expected"),
    [(4, 1, 4, [3]), (4, 2, 4, [2, 3]), (3, 2, 4, [2]), (2, 2, 4, []), (4, 0, 4, []), (2, 4, 2, [0, 1])],
)
def test_weights_that_a_longer_run_needs_are_those_its_next_batches_are_made_of(step, lag, num_steps, expected):
    """Batches up to `num_steps` were made, so the checkpoint holds them; those after come from weights before it."""
    assert older_sources(step, lag, num_steps) == expected
    schedule = Schedule(lag)
    sources = {schedule.weights_step(batch) for batch in range(num_steps + 1, num_steps + 20)}
    assert sorted(source for source in sources if source < step) == expected
