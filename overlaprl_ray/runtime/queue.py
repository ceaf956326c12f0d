"""What waits between the actors: batches as tickets, in order, never more than the schedule allows.

queue = RolloutQueue(capacity=3)
queue.put(Ticket(batch=1, weights_step=0))
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from overlaprl_ray.workers.metrics import StepResult


@dataclasses.dataclass
class Ticket:
    """One batch, with references to what becomes of it: one per call, by the call's name."""

    batch: int
    weights_step: int  # the step whose weights generate it
    evaluations: list[int] = dataclasses.field(default_factory=list)  # steps evaluated ahead of it, to be collected
    calls: dict[str, Any] = dataclasses.field(default_factory=dict)  # None: lost with an actor
    result: StepResult | None = None  # once it is collected

    def call(self, name: str, method: Any, *arguments: Any) -> Any:
        """The reference to a call's result; submits the call unless that was done before."""
        if self.calls.get(name) is None:
            self.calls[name] = method.remote(*arguments)
        return self.calls[name]

    @property
    def shares(self) -> list[Any]:
        """References to its rollout: a share of each generator."""
        return [reference for name, reference in self.calls.items() if name.startswith("generate")]


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
        """Take the oldest batch. Ray frees its objects once nobody holds the ticket."""
        return self._tickets.popleft()
