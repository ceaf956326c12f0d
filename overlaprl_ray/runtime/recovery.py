"""What happens when an actor dies: it is restarted, and exactly the work that was lost is done again.

A generator or reference only repeats its unfinished calls. A learner goes back to the newest checkpoint (or the initial
model) and repeats the steps since then on the very rollouts they had: their numbers must come out the same, and that is
checked. Under CUDA MPS all actors are restarted: killing one with work in flight leaves the others' undefined.

    for result in Recovery(pipeline, actors, say=print, mps=False).steps():
        record.add_step(result)
"""

from collections.abc import Callable, Iterator

from overlaprl_ray.errors import RunError
from overlaprl_ray.runtime.pipeline import Pipeline
from overlaprl_ray.runtime.queue import Ticket
from overlaprl_ray.runtime.supervisor import ActorDied, Actors
from overlaprl_ray.workers.results import StepResult
from overlaprl_ray.workers.watchdog import take_timeout


class Recovery:
    """Runs a pipeline to its end through the deaths of actors; `restarts` counts them."""

    def __init__(self, pipeline: Pipeline, actors: Actors, say: Callable[[str], None], mps: bool = False):
        self.pipeline, self.actors, self.say, self.mps = pipeline, actors, say, mps
        self.restarts = 0
        self.steps_done = 0  # by this process
        self.learner_behind = False  # whether a new learner was not given the steps to repeat yet

    def steps(self) -> Iterator[StepResult]:
        """`Pipeline.steps`, through up to `pipeline.max_restarts` deaths. Raises `RunError`."""
        death: RunError | None = None
        while True:
            try:
                if death:
                    self._recover(death)
                    death = None
                for result in self.pipeline.steps():
                    self.steps_done += 1
                    yield result
                return
            except ActorDied as error:  # also during a recovery, which can start over at any point
                death = error
            except RunError as error:  # under MPS a death can first be seen as another actor's CUDA error
                if death or not (self.mps and self.actors.dead()):
                    raise
                death = error

    def _recover(self, death: RunError) -> None:
        """Bring the run back to where the pipeline can continue. Raises `RunError` where it cannot."""
        graph, limit = self.pipeline.graph, self.actors.config.pipeline.max_restarts
        if ended := take_timeout(graph.folder):  # it would only take as long again
            raise RunError(ended)
        graph.settle()
        dead = self.actors.dead()
        if not dead and not self.learner_behind:
            raise RunError(f"{death} (every actor is alive, so an object of the run was lost)")
        if self.restarts + len(dead) > limit:
            raise RunError(f"{death} (pipeline.max_restarts = {limit} is used up)")
        stream = graph.schedule.stream
        roles = self.actors.roles if (self.mps or stream) and dead else dead
        if "learner" in roles:
            self._check_repeatable(death)
            self.learner_behind = True
        for role in dead:
            self.restarts += 1
            name = f"{self.actors.run}/{role}"
            self.say(f"{name} died; restarting it ({self.restarts} of {limit} restarts): {death}")
        if others := [role for role in roles if role not in dead]:
            why = "a stream goes back as a whole" if stream else "under CUDA MPS their work is undefined now"
            self.say(f"restarting {', '.join(others)} too: {why}")
        self.actors.restart(roles)
        repeated = graph.resubmit(new_learner=self.learner_behind)
        self.learner_behind = False
        if repeated:
            self.say(f"the learner repeats steps {repeated[0].batch} to {repeated[-1].batch} on the rollouts they had")
        for ticket in repeated:
            self._compare(ticket)
            graph.report(ticket)  # its evaluations are on record

    def _check_repeatable(self, death: RunError) -> None:
        """Without checkpoints nobody kept the rollouts that a new learner would have to repeat."""
        if self.steps_done and not self.actors.config.output.checkpoint_every:
            raise RunError(f"{death} (output.checkpoint_every is 0, so there is no checkpoint to go back to)")

    def _compare(self, repeated: Ticket) -> None:
        """A repeated step must give the same numbers; on a GPU sums may differ in their last bits."""
        again = self.actors.fetch(repeated.calls["train"], f"step {repeated.batch}, repeated")
        if repeated.result is None or again.metrics == repeated.result.metrics:
            return
        difference = f"step {repeated.batch} gave other numbers when it was repeated"
        if self.actors.fetch(self.actors.learner.device.remote(), "the learner's device") == "cpu":
            raise RunError(f"{difference}: has the machine changed?")
        self.say(f"{difference}, as sums on a GPU may: this recovery is not exact")
