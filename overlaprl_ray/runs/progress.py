"""What a run prints: a bar on a terminal, plain lines in a log, and a table at the end.

with Progress(num_steps=200) as progress:
    progress.step(row); progress.evaluation(evaluation)
"""

import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from overlaprl_ray.workers.results import Evaluation

# A log gets a line after this many seconds and this share of the steps, so that a long run's stays short; at the latest
# after LINE_AFTER_S, as a sign of life.
LINE_EVERY_S, LINE_EVERY_SHARE, LINE_AFTER_S = 10.0, 0.02, 300.0


class Progress:
    """A bar with the last step's reward, staleness and speed on a terminal; elsewhere a line now and then."""

    def __init__(self, num_steps: int, console: Console | None = None):
        self.console = console or Console(soft_wrap=True)
        self.num_steps = num_steps
        self.last_line, self.last_line_step = 0.0, 0
        columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn())
        description = TextColumn("{task.description}", markup=False)
        self.bar = Bar(TextColumn("step"), *columns, description, console=self.console, refresh_per_second=2)
        self.task = self.bar.add_task("", total=num_steps)

    def __enter__(self) -> Self:
        if self.console.is_interactive:  # else a log would be full of control codes
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_interactive:
            self.bar.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, emoji=False)

    def step(self, row: dict[str, Any]) -> None:
        """A finished step."""
        step, kl, decision = row["step"], row["staleness/kl"], row["staleness/decision"]
        text = f"reward {_text(row['reward'], '.3f')}  staleness KL {_text(kl, '.2g')} ({decision})"
        text += f"  {row['tokens_per_s'] or 0:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, description=text)
        if not self.console.is_interactive and self._line_due(step):
            self.last_line, self.last_line_step = time.monotonic(), step
            left = row["wall_s"] / step * (self.num_steps - step)
            self.say(f"step {step}/{self.num_steps}  {text}  {left:.0f} s left")

    def _line_due(self, step: int) -> bool:
        waited = time.monotonic() - self.last_line
        advanced = step - self.last_line_step >= LINE_EVERY_SHARE * self.num_steps
        return step == self.num_steps or (waited >= LINE_EVERY_S and advanced) or waited >= LINE_AFTER_S

    def evaluation(self, done: Evaluation) -> None:
        """A held-out evaluation."""
        self.say(f"held-out accuracy after step {done.step}: {done.accuracy:.3f} (n={done.n})")


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def closing_table(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """What the run achieved, how long it took, and where the files are."""

    def change(start: float | None, end: float | None) -> str:
        return "-" if start is None or end is None else f"{start:.3f} → {end:.3f}  ({end - start:+.3f})"

    rewards = change(summary["reward_first_10"], summary["reward_last_10"])
    table = Table(show_header=False, title=f"{summary['mode']}, lag {summary['lag']}, seed {summary['seed']}")
    table.add_row("held-out accuracy (greedy)", change(summary["accuracy_start"], summary["accuracy_final"]))
    table.add_row("sampled reward, first → last 10 steps", rewards)
    table.add_row("steps", f"{summary['steps']} at {summary['steps_per_s'] or 0:.2f} per second")
    table.add_row("generated", f"{summary['tokens']:,} tokens in {summary['samples']:,} completions")
    table.add_row("staleness decisions", ", ".join(f"{count} {name}" for name, count in summary["decisions"].items()))
    table.add_row("time, without start-up", f"{summary['wall_s']:.0f} s")
    console.print(table)
    for text in (*summary["notices"], f"files: {folder}"):
        console.print(text, highlight=False, markup=False)
