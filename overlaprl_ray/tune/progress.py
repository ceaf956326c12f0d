"""What a person sees of a sweep: plain lines, on a terminal and in a log file alike.

RunConfig(callbacks=[SweepProgress(sweep, folder, total=12, finished=4, cases={})])
"""

import time
from pathlib import Path
from typing import Any

from ray.tune import Callback
from rich.console import Console

from overlaprl_ray.tune.search_space import Point
from overlaprl_ray.tune.spec import Sweep, TrialPlan, describe, make_trial
from overlaprl_ray.tune.trainable import SETTINGS, leave_error, mark_stopped

Trials = list[Any]  # Tune's
Row = dict[str, Any]

EVERY_S = 30.0  # seconds between lines about what is running,
EVERY_SHARE = 0.05  # or this share of the time so far, if that is longer: a log of days stays short


class SweepProgress(Callback):
    """Says when trials start, end and fail, and how the running ones stand; leaves a mark where one is cut short."""

    def __init__(self, sweep: Sweep, folder: Path, total: int, finished: int, cases: dict[str, str]):
        self.sweep, self.folder, self.total, self.finished = sweep, folder, total, finished
        self.ended: set[str] = set()  # trials that came to an end now; Tune may tell of one twice
        self.cases = cases  # trial -> the case it belongs to
        self.running: dict[str, str] = {}  # trial -> how it stands
        self.steps = 0
        self.started = self.spoken = time.monotonic()
        self.left = (total - finished) * make_trial(sweep, Point({}), folder).config.grpo.num_steps  # about

    def on_trial_start(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has been given its resources."""
        plan = self._plan(trial)
        self.running[plan.name] = "starting"
        case = self.cases.get(plan.name)
        self._say(f"started {plan.name}: {f'{case}: ' if case else ''}{describe(plan.point.settings)}")

    def on_trial_result(self, iteration: int, trials: Trials, trial: Any, result: Row, **info: Any) -> None:
        """A step of a trial."""
        plan = self._plan(trial)
        accuracy = result.get("eval/accuracy")
        shown = "-" if accuracy is None else f"{accuracy:.3f}"
        self.running[plan.name] = (
            f"step {result['step']}/{plan.config.grpo.num_steps} reward {result['reward']:.3f} accuracy {shown}"
        )
        self.steps += 1
        now = time.monotonic()
        if now - self.spoken >= max(EVERY_S, EVERY_SHARE * (now - self.started)):
            self._say("running: " + "; ".join(f"{name} {text}" for name, text in self.running.items()) + self._eta())

    def on_trial_complete(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has run to its end, or Tune has ended it by its scheduler or by `tune.stop`."""
        plan = self._plan(trial)
        stood = self.running.pop(plan.name, "")
        self.ended.add(plan.name)
        stopped = mark_stopped(plan, trial.last_result)
        self._say(f"{'stopped early' if stopped else 'finished'} {plan.name}: {stood}{self._eta()}")

    def on_trial_error(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has failed for good. Where its own process could not say why (it was killed), Tune's word stands."""
        plan = self._plan(trial)
        self.running.pop(plan.name, None)
        self.ended.add(plan.name)
        file = plan.folder / "error.txt"
        if not file.exists():
            leave_error(plan, f"the trial's process ended: {trial.get_pickled_error() or 'no reason is known'}")
        self._say(f"failed {plan.name}: {file.read_text(encoding='utf-8').strip()}")

    def on_trial_recover(self, iteration: int, trials: Trials, trial: Any, **info: Any) -> None:
        """A trial has failed and is tried again."""
        plan = self._plan(trial)
        self.running[plan.name] = "waiting to be tried again"
        self._say(f"failed, to be tried again from its checkpoint: {plan.name}")

    def _plan(self, trial: Any) -> TrialPlan:
        return make_trial(self.sweep, Point(trial.config[SETTINGS]), self.folder)

    def _eta(self) -> str:
        if self.steps < 0.05 * self.left:  # what has run so far is mostly starting
            return ""
        seconds = (time.monotonic() - self.started) / self.steps * max(0, self.left - self.steps)
        return f"; about {duration(seconds)} left"

    def _say(self, text: str) -> None:
        self.spoken = time.monotonic()
        console = Console(soft_wrap=True)  # made anew: Tune pickles its callbacks, and a console cannot be
        console.print(f"[{self.finished + len(self.ended)}/{self.total}] {text}", highlight=False, markup=False)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
