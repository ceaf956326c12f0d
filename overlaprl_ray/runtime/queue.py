"""What waits between the actors: object references, stamped, in order, never more than the schedule allows.

queue = RolloutQueue(capacity=3)
queue.put(Ticket(batch=1, weights_step=0, shares=[...], scores=None, result=...))
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ticket:
    """One batch on its way: who made it, and references to all that becomes of it."""

    batch: int
    weights_step: int  # the step whose weights generate it
    shares: list[Any]  # -> Rollout, one per generator
    scores: Any | None  # -> Scores
    result: Any = None  # -> StepResult

    def with_result(self, result: Any) -> "Ticket":
        """The same batch, submitted to the learner."""
        return dataclasses.replace(self, result=result)


class RolloutQueue:
    """A bounded FIFO. Back-pressure is the driver not submitting: nothing ever blocks on it."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    @property
    def full(self) -> bool:
        """Whether another batch would exceed the bound."""
        return len(self) >= self.capacity

    @property
    def head(self) -> Ticket:
        """The batch that is trained on next (or now)."""
        return self._tickets[0]

    @property
    def newest(self) -> Ticket | None:
        """The batch submitted last."""
        return self._tickets[-1] if self._tickets else None

    def put(self, ticket: Ticket) -> None:
        """Append the next batch in order."""
        if self.full:
            raise ValueError(f"queue of {self.capacity} is full at batch {ticket.batch}")
        if self.newest and ticket.batch != self.newest.batch + 1:
            raise ValueError(f"batch {ticket.batch} cannot follow batch {self.newest.batch}")
        self._tickets.append(ticket)

    def pop(self) -> Ticket:
        """Take the oldest batch: with its references go the objects in the store."""
        return self._tickets.popleft()
