"""What a person sees of a running sweep: plain lines, on a terminal and in a log file alike.

Ray Tune's own reporter prints whole tables again and again, and paths and tracebacks that mean little here.

    RunConfig(callbacks=[SweepProgress(sweep, folder, total=12, finished=4)])
"""

import time
from pathlib import Path
from typing import Any

from ray.tune import Callback
from rich.console import Console

from overlaprl_ray.tune.plan import TrialPlan
from overlaprl_ray.tune.spec import Sweep
from overlaprl_ray.tune.trainable import failure, leave_error, mark_if_stopped, trial_of
from overlaprl_ray.workers.watchdog import take_timeout

Trials = list[Any]  # Tune's
Row = dict[str, Any]

EVERY_S = 30.0  # seconds between lines about what is running,
EVERY_SHARE = 0.05  # or this share of the time so far, if that is longer: a log of days stays short


class SweepProgress(Callback):
    """Says when trials start, end and fail, and how the running ones stand; marks those that are cut short."""

    def __init__(self, sweep: Sweep, folder: Path, total: int, finished: int):
        self.sweep, self.folder, self.total, self.finished = sweep, folder, total, finished
        self.ended: set[str] = set()  # by now; Tune may tell of one twice
        self.running: dict[str, str] = {}  # trial -> how it stands
        self.started = self.spoken = time.monotonic()

    def on_trial_start(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has been given its resources."""
        plan = self._plan(trial)
        self.running[plan.name] = "starting"
        self._say(f"started {plan.name}: {plan.point}")

    def on_trial_result(self, iteration: int, trials: Trials, trial: Any, result: Row, **info: Any) -> None:
        """A step of a trial."""
        plan = self._plan(trial)
        reward = "-" if result["reward"] is None else f"{result['reward']:.3f}"
        numbers = f"reward {reward} accuracy {result['eval/accuracy']:.3f}"
        self.running[plan.name] = f"step {result['step']}/{plan.config.grpo.num_steps} {numbers}"
        now = time.monotonic()
        if now - self.spoken >= max(EVERY_S, EVERY_SHARE * (now - self.started)):
            self._say("running: " + "; ".join(f"{name} {state}" for name, state in self.running.items()))

    def on_trial_complete(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has run to its end, or Tune has ended it by its scheduler or by `tune.stop`."""
        plan = self._plan(trial)
        self.ended.add(plan.name)
        stopped = mark_if_stopped(plan.folder, trial.last_result.get("step"))
        self._say(f"{'stopped early' if stopped else 'finished'} {plan.name}: {self.running.pop(plan.name, '')}")

    def on_trial_error(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has failed for good. Where its own process could not say why (it was killed), Tune's word stands."""
        plan = self._plan(trial)
        self.ended.add(plan.name)
        self.running.pop(plan.name, None)
        ended = take_timeout(plan.folder) or f"the trial's process ended: {trial.get_pickled_error()}"
        error = failure(plan.folder) or leave_error(plan, ended)
        self._say(f"failed {plan.name}: {error}")

    def on_trial_recover(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has failed and is tried again."""
        plan = self._plan(trial)
        self.running[plan.name] = "waiting to be tried again"
        self._say(f"failed, to be tried again from its checkpoint: {plan.name}")

    def _plan(self, trial: Any) -> TrialPlan:
        return trial_of(trial.config, self.sweep, self.folder)

    def _say(self, text: str) -> None:
        self.spoken = time.monotonic()
        console = Console(soft_wrap=True)  # made anew: Tune pickles its callbacks, and a console cannot be
        console.print(f"[{self.finished + len(self.ended)}/{self.total}] {text}", highlight=False, markup=False)
