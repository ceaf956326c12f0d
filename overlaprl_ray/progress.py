"""What a person sees while a run goes on: a live line on a terminal, plain lines in a log, and a table at the end.

with Progress(num_steps=200) as progress:
    progress.step(row); progress.evaluation(evaluation)
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from overlaprl_ray.metrics import Evaluation

LOG_EVERY_S = 10.0  # seconds between plain lines when nobody watches a terminal


class Progress:
    """A bar with reward, KL and speed on a terminal; without one, a line every ten seconds and at the last step."""

    def __init__(self, num_steps: int, console: Console | None = None):
        self.console = console or Console(soft_wrap=True)
        self.num_steps = num_steps
        self.last_line = 0.0
        self.bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("train", total=num_steps, note="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, markup=False)

    def step(self, row: dict[str, Any]) -> None:
        """A finished step."""
        kl = row["staleness/kl"]
        note = (
            f"reward {row['reward']:.3f}  staleness KL {'-' if kl is None else f'{kl:.2g}'} "
            f"({row['staleness/decision']})  {row['tokens_per_s'] or 0:,.0f} tokens/s"
        )
        self.bar.update(self.task, completed=row["step"], note=note)
        due = time.monotonic() - self.last_line >= LOG_EVERY_S or row["step"] == self.num_steps
        if not self.console.is_terminal and due:
            self.last_line = time.monotonic()
            left = row["wall_s"] / row["step"] * (self.num_steps - row["step"])
            self.say(f"step {row['step']}/{self.num_steps}  {note}  {left:.0f} s left")

    def evaluation(self, done: Evaluation) -> None:
        """A held-out evaluation."""
        self.say(f"held-out accuracy after step {done.step}: {done.accuracy:.3f} (n={done.n})")


def closing_table(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """From where to where, how long it took, and where the files are."""

    def change(start: float | None, end: float | None) -> str:
        return "-" if start is None or end is None else f"{start:.3f} → {end:.3f}  ({end - start:+.3f})"

    decisions = ", ".join(f"{count} {name}" for name, count in summary["decisions"].items())
    table = Table(show_header=False, title=f"{summary['mode']}, lag {summary['lag']}, seed {summary['seed']}")
    table.add_row("held-out accuracy (greedy)", change(summary["accuracy_start"], summary["accuracy_final"]))
    table.add_row(
        "sampled reward, first → last 10 steps", change(summary["reward_first_10"], summary["reward_last_10"])
    )
    table.add_row("steps", f"{summary['steps']} at {summary['steps_per_s'] or 0:.2f} per second")
    table.add_row("generated", f"{summary['tokens']:,} tokens in {summary['samples']:,} completions")
    table.add_row("staleness decisions", decisions)
    table.add_row("time, without start-up", f"{summary['wall_s']:.0f} s")
    console.print(table)
    for text in summary["notices"]:
        console.print(text, highlight=False, markup=False)
    console.print(f"files: {folder}", highlight=False, markup=False)
