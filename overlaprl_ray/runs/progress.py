"""What a run prints: a live view on a terminal, plain lines in a log, and a table at the end.

with Progress(num_steps=200) as progress:
    progress.step(row); progress.evaluation(evaluation)
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from overlaprl_ray.workers.metrics import Evaluation

# A log gets a line after this many seconds and this share of the steps, so that a long run's stays short; at the latest
# after LINE_AFTER_S, as a sign of life.
LINE_EVERY_S, LINE_EVERY_SHARE, LINE_AFTER_S = 10.0, 0.02, 300.0
RECENT = 20  # steps that "now" means

LANES = {"generator": ("generate", "weights"), "reference": ("reference",), "learner": ("train", "publish")}


class Progress:
    """A live view of learning, staleness and overlap on a terminal; elsewhere a line now and then."""

    def __init__(self, num_steps: int, console: Console | None = None):
        self.console = console or Console(soft_wrap=True)
        self.num_steps = num_steps
        self.rows: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.first_rewards: list[float | None] = []
        self.accuracies: list[float] = []
        self.decisions: Counter[str] = Counter()
        self.last_line, self.last_line_step = 0.0, 0
        columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn(), TextColumn("left"))
        self.bar = Bar(TextColumn("step"), *columns, console=self.console)
        self.task = self.bar.add_task("train", total=num_steps)
        self.live = Live(console=self.console, get_renderable=self.view, refresh_per_second=2)

    def __enter__(self) -> Self:
        if self.console.is_interactive:  # else a log would be full of control codes
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, emoji=False)

    def step(self, row: dict[str, Any]) -> None:
        """A finished step."""
        self.rows.append(row)
        if len(self.first_rewards) < 10:
            self.first_rewards.append(row["reward"])
        self.decisions[row["staleness/decision"]] += 1
        self.bar.update(self.task, completed=row["step"])
        if not self.console.is_interactive and self._line_due(row["step"]):
            self.last_line, self.last_line_step = time.monotonic(), row["step"]
            left = row["wall_s"] / row["step"] * (self.num_steps - row["step"])
            self.say(
                f"step {row['step']}/{self.num_steps}  reward {_text(row['reward'], '.3f')}  staleness KL "
                f"{_text(row['staleness/kl'], '.2g')} ({row['staleness/decision']})  "
                f"{row['tokens_per_s'] or 0:,.0f} tokens/s  {left:.0f} s left"
            )

    def _line_due(self, step: int) -> bool:
        waited = time.monotonic() - self.last_line
        advanced = step - self.last_line_step >= LINE_EVERY_SHARE * self.num_steps
        return step == self.num_steps or (waited >= LINE_EVERY_S and advanced) or waited >= LINE_AFTER_S

    def evaluation(self, done: Evaluation) -> None:
        """A held-out evaluation."""
        self.accuracies.append(done.accuracy)
        self.say(f"held-out accuracy after step {done.step}: {done.accuracy:.3f} (n={done.n})")

    def view(self) -> RenderableType:
        """The live view: a bar and, from the first step on, a table."""
        if not self.rows:
            return self.bar
        row, table = self.rows[-1], Table.grid(padding=(0, 2))
        now, first = _mean(r["reward"] for r in self.rows), _mean(self.first_rewards)
        table.add_row("reward", f"{_text(now, '.3f')}  (first steps {_text(first, '.3f')})")
        if self.accuracies:
            table.add_row("held-out accuracy", f"{self.accuracies[-1]:.3f}  (first {self.accuracies[0]:.3f})")
        kl, lag, weight = (row[f"staleness/{name}"] for name in ("kl", "lag", "weight"))
        judged = "  ".join(f"{self.decisions[name]} {name}" for name in ("fresh", "stale", "discard"))
        table.add_row("staleness", f"KL {_text(kl, '.2g')}  lag {lag}  weight {_text(weight, '.2f')}  |  {judged}")
        seconds = sum(r["time/step"] for r in self.rows)
        worked = {lane: sum(r[f"time/{s}"] or 0.0 for r in self.rows for s in stages) for lane, stages in LANES.items()}
        worked["generator"] -= sum(r["time/publish"] for r in self.rows)  # the learner's part of `weights`
        meters = [f"{lane} {_meter(busy / seconds)}" for lane, busy in worked.items() if busy and seconds]
        table.add_row("at work", "  ".join(meters))
        speed = f"{len(self.rows) / seconds if seconds else 0:.2f} steps/s  {row['tokens_per_s'] or 0:,.0f} tokens/s"
        memory = sum(value for name, value in row.items() if name.startswith("memory/"))
        table.add_row("speed", f"{speed}  memory {memory:.1f} GB")
        return Group(self.bar, table)


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _meter(share: float) -> str:
    full = round(8 * min(1.0, share))
    return f"{'█' * full}{'░' * (8 - full)} {min(1.0, share):4.0%}"


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
