"""What waits between the actors: batches as tickets, in order, never more than the schedule allows.

queue = RolloutQueue(capacity=3)
queue.put(Ticket(batch=1, weights_step=0))
"""

import dataclasses
from collections import deque
from typing import Any

from overlaprl_ray.workers.results import StepResult


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


class RolloutQueue(deque[Ticket]):
    """A bounded FIFO, oldest batch first. Back-pressure is the driver not submitting: nothing ever blocks on it."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    @property
    def full(self) -> bool:
        """Whether another batch would exceed the bound."""
        return len(self) >= self.capacity

    def put(self, ticket: Ticket) -> None:
        """Append the next batch in order."""
        if self.full:
            raise ValueError(f"queue of {self.capacity} is full at batch {ticket.batch}")
        if self and ticket.batch != self[-1].batch + 1:
            raise ValueError(f"batch {ticket.batch} cannot follow batch {self[-1].batch}")
        self.append(ticket)
