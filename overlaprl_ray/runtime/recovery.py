"""What happens when an actor dies: it is started anew, and exactly the work that was lost is done again.

Rollouts, scores and weights belong to the driver, so they survive the process that made them. A generator or reference
only repeats its unfinished calls. A learner goes back to the newest checkpoint (or the initial model) and repeats the
steps since then on the very rollouts they had: their numbers must come out the same, and that is checked.

    run_through(pipeline, save_to=folder / "final", say=print)    # returns how many actors were started anew
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from overlaprl_ray.errors import RunError
from overlaprl_ray.runs.checkpoint import clear_scratch
from overlaprl_ray.runtime.pipeline import Pipeline
from overlaprl_ray.runtime.queue import Ticket
from overlaprl_ray.runtime.supervisor import ActorDied, in_vain

FETCH_S = 60.0  # for an object that is there


def run_through(pipeline: Pipeline, save_to: Path | None, say: Callable[[str], None]) -> int:
    """Run to the end, through the deaths of up to `pipeline.max_restarts` actors. Raises `RunError`."""
    recovery = Recovery(pipeline, say)
    death: ActorDied | None = None
    while True:
        try:
            if death:
                recovery.recover(death)
                death = None
            pipeline.advance(save_to)
            return recovery.restarts
        except ActorDied as error:  # during a recovery too: it can begin again at any point
            death = error


class Recovery:
    """Starts dead actors anew and submits what was lost with them."""

    def __init__(self, pipeline: Pipeline, say: Callable[[str], None]):
        self.pipeline, self.say = pipeline, say
        self.restarts = 0
        self.learner_behind = False  # a new learner has not been given the steps it must repeat

    def recover(self, death: ActorDied) -> None:
        """Bring the run back to where `advance` can go on. Raises `RunError` where it cannot."""
        run, limit = self.pipeline, self.pipeline.config.pipeline.max_restarts
        self._settle()
        dead = run.actors.dead()
        if not dead and not self.learner_behind:
            raise RunError(f"{death} (and yet every actor lives: an object of the run was lost)")
        if self.restarts + len(dead) > limit:
            raise RunError(f"{death} (pipeline.max_restarts = {limit} is used up)")
        for role in dead:
            self.restarts += 1
            if role == "learner":
                self._check_base(death)
                self.learner_behind = True
            self.say(f"{run.actors.run}/{role} died; starting it anew ({self.restarts} of {limit} restarts): {death}")
            run.actors.restart(role)
        kept, repeated = self._rewind_learner() if self.learner_behind else ({}, [])
        self._submit_again(kept, all_steps=self.learner_behind)
        self.learner_behind = False
        for then, now in repeated:
            self._compare(then, now)

    def _check_base(self, death: ActorDied) -> None:
        """Without checkpoints nobody kept the rollouts that a new learner would have to repeat."""
        run = self.pipeline
        if run.finished and not run.config.output.checkpoint_every:
            raise RunError(f"{death} (output.checkpoint_every is 0, so there is nothing to go on from)")

    def _settle(self) -> None:
        """Wait until each call in flight has ended: an actor that lives finishes its own, a dead one's fail at once."""
        run = self.pipeline
        pending = [
            ref for ticket in run.queue for ref in (*ticket.shares, ticket.scores, ticket.result) if ref is not None
        ]
        pending += [ref for _, _, ref in run.evaluating] + list(run.completing.values())
        limit = run.config.pipeline.timeout_s
        if pending and ray.wait(pending, num_returns=len(pending), timeout=limit, fetch_local=False)[1]:
            raise in_vain("the calls in flight after an actor's death", "pipeline.timeout_s")

    def _rewind_learner(self) -> tuple[dict[int, list[Any]], list[tuple[Ticket, Ticket]]]:
        """Load the base and submit the steps that are finished already once more.

        Returns the rollouts that lay in the base, as shares by batch, and (then, now) of each repeated step.
        """
        run = self.pipeline
        run.begun.clear()  # what the old learner had copied for a checkpoint is gone
        run.completing.clear()
        clear_scratch(run.folder)
        base = run.base.step if run.base else 0
        known = dict(run.weights)
        published, kept = run.load_base()
        if base in known and not intact(known[base]):
            known[base] = published
        repeated = [(run.held[batch], run.train(run.held[batch])) for batch in range(base + 1, run.finished + 1)]
        run.weights = known  # the repeated steps publish nothing new
        if repeated:
            self.say(f"the learner repeats steps {base + 1} to {run.finished} on the rollouts they had")
        return kept, repeated

    def _submit_again(self, kept: dict[int, list[Any]], all_steps: bool) -> None:
        """Every call on the way whose result is lost, in the order of the schedule."""
        run = self.pipeline
        for step in [s for s, reference in run.completing.items() if not intact(reference)]:
            del run.completing[step]  # it is begun and will be completed again
        tickets, run.queue = list(run.queue), type(run.queue)(run.queue.capacity)
        previous = None
        for ticket in tickets:
            self._evaluate_again(ticket.batch)
            shares = list(ticket.shares)
            for i in [i for i, share in enumerate(shares) if not intact(share)]:
                in_base = kept.get(ticket.batch)
                shares[i] = in_base[i] if in_base else run.generate(i, ticket.batch, ticket.weights_step)
            scores = ticket.scores if intact(ticket.scores) else run.score(shares, previous)
            again = Ticket(ticket.batch, ticket.weights_step, shares, scores, ticket.result)
            if all_steps or not intact(ticket.result):
                again = run.train(again)
            run.queue.put(again)
            previous = again.result
        self._evaluate_again(run.submitted + 1)

    def _evaluate_again(self, batch: int) -> None:
        """The lost evaluations that come before a batch."""
        run = self.pipeline
        for i, (before, step, reference) in enumerate(run.evaluating):
            if before == batch and not intact(reference):
                run.evaluating[i] = (before, step, run.evaluate(step))

    def _compare(self, old: Ticket, new: Ticket) -> None:
        then, now = (self.pipeline.fetch(t.result, f"step {t.batch}, repeated") for t in (old, new))
        if then.metrics == now.metrics:
            return
        if not (self.pipeline.actors.plan.learner_gpu and torch.cuda.is_available()):
            raise RunError(f"step {old.batch} gave other numbers when it was repeated: is the machine another one now?")
        self.say(f"step {old.batch} gave other numbers when it was repeated, as sums on a GPU may: no exact recovery")


def intact(reference: Any | None) -> bool:
    """Whether a call that has ended left a result (None: there was no such call)."""
    if reference is None:
        return True
    try:
        ray.get(reference, timeout=FETCH_S)
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"waited {FETCH_S:g} s in vain for a result that is there; is its node gone?") from None
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError, ray.exceptions.ObjectLostError):
        return False
    return True
