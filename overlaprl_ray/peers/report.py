"""A comparison's files: peers.json, peers.csv, curve.csv, curve.png, table.md, and the table on the terminal.

write_report(folder, found); console.print(table(found))
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]


def write_report(folder: Path, found: Row) -> None:
    """Write (or write anew) everything that a comparison leaves in its folder."""
    (folder / "peers.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "table.md").write_text("\n".join([*markdown(found), "", *caption(found)]) + "\n", encoding="utf-8")
    plain = [{name: value for name, value in run.items() if name != "curve"} for run in found["runs"]]
    _csv(folder / "peers.csv", plain)
    points = curve_rows(found["runs"])
    if points:
        _csv(folder / "curve.csv", points)
        accuracy_over_time(points, found["target"]).savefig(folder / "curve.png")


def _csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def curve_rows(runs: Sequence[Row]) -> list[Row]:
    """A row per evaluation: arm, seed, seconds of training before it, held-out accuracy."""
    return [
        {"arm": run["label"], "seed": run["seed"], "seconds": seconds, "accuracy": accuracy}
        for run in runs
        for seconds, accuracy in run["curve"]
    ]


def caption(found: Row) -> list[str]:
    """What it was measured on, and what the words mean, in lines."""
    where, config = found["environment"], found["config"]
    grpo, versions = config["grpo"], where["versions"]
    evaluated = found["every"] is not None
    lines = [
        f"{' + '.join([where['cpu'], *where['gpus']])}, {where['cpus']} cores; commit "
        f"{(where['git_commit'] or 'unknown')[:10]}, TRL {versions['trl']}, torch {versions['torch']}",
        f"{Path(grpo['model_name']).name} ({found['work']}), {config['model']['dtype']}, "
        f"{grpo['num_prompts_per_step']} × {grpo['group_size']} completions of "
        f"{'at most ' if evaluated else 'exactly '}{grpo['max_new_tokens']} tokens, beta {grpo['beta']:g}, "
        f"{found['repeats']} interleaved run(s) of {grpo['num_steps']} steps, a process each",
        "speed: samples/s over those of TRL's best arm here. memory: peak of all processes together, shared pages once",
    ]
    if evaluated:
        lines.append(f"seconds leave out evaluations in every arm; the same evaluator every {found['every']} steps")
    else:
        lines.append(f"steps counted: all but the first {found['warm_up']} and the last")
    return lines


def _columns(found: Row) -> dict[str, tuple[str, int]]:
    """Column title -> (figure, digits)."""
    speed = {"s/step ↓": ("step_s", 3), "samples/s ↑": ("samples_per_s", 2), "tokens/s ↑": ("tokens_per_s", 0),
             "speed ↑": ("speed", 2), "memory GB ↓": ("pss_gb", 2)}  # fmt: skip
    if found["every"] is None:
        return speed
    learned = {"accuracy first": ("accuracy_start", 3), "accuracy last ↑": ("accuracy_final", 3)}
    late = {} if found["target"] is None else {
        f"s to {found['target']:g} ↓": ("seconds_to_target", 1), "over TRL's ↓": ("to_target", 2)}  # fmt: skip
    return {"s/step ↓": speed["s/step ↓"], **learned, "seconds": ("train_s", 0), **late}


def _cell(arm: Row, figure: str, digits: int, gap: str) -> str:
    value, low, high = arm[figure], arm[f"{figure}_min"], arm[f"{figure}_max"]
    if low is None:
        return "-"
    middle, most = ("never" if number is None else f"{number:,.{digits}f}" for number in (value, high))
    return middle + (f"{gap}({low:,.{digits}f}–{most})" if arm["runs"] > 1 else "")


def markdown(found: Row) -> list[str]:
    """The table as lines of Markdown: medians (range)."""
    columns = _columns(found)
    lines = ["| arm | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for arm in found["arms"]:
        cells = [_cell(arm, figure, digits, " ") for figure, digits in columns.values()]
        lines.append("| " + " | ".join([arm["label"], *cells]) + " |")
    return lines


def table(found: Row) -> Group:
    """The table for a terminal of 80 columns, with what it was measured on."""
    columns = _columns(found)
    title = "Side by side with TRL: medians, the range below"
    out = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    out.add_column("\narm")
    for name in columns:
        out.add_column("\n".join(name.split(" ", 1)), justify="right", no_wrap=True)
    for arm in found["arms"]:
        out.add_row(arm["label"], *(_cell(arm, figure, digits, "\n") for figure, digits in columns.values()))
    return Group(out, "", Text("\n".join(caption(found))))


def accuracy_over_time(points: Sequence[Row], target: float | None = None) -> Figure:
    """Held-out accuracy over seconds of training, a colour per arm and a line per seed; rows as in curve.csv."""
    from overlaprl_ray.reports.figures import LINES, MARKERS, OTHERS, WIDTH, new_figure, tidy

    figure = new_figure(WIDTH, 3.2)
    axes = figure.add_subplot()
    for place, arm in enumerate(dict.fromkeys(point["arm"] for point in points)):
        own = [point for point in points if point["arm"] == arm]
        seeds = dict.fromkeys(point["seed"] for point in own)
        look: Row = {"color": OTHERS[place % len(OTHERS)], "ls": LINES[place % len(LINES)], "lw": 1.6}
        for number, seed in enumerate(seeds):
            drawn = [(float(p["seconds"]), float(p["accuracy"])) for p in own if p["seed"] == seed]
            label = f"{arm}, {len(seeds)} seed(s)" if number == 0 else None
            axes.plot(*zip(*drawn, strict=True), **look, marker=MARKERS[place % len(MARKERS)], ms=4, label=label)
    if target is not None:
        axes.axhline(target, color="#999999", lw=1, ls=":", label=f"target {target:g}")
    tidy(axes, "seconds of training (evaluations left out)", "held-out accuracy (greedy)")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8)
    return figure
