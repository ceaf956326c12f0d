"""Figures of a study: what was learned, how fast, at what speed. reports/staleness_figures.py has those on staleness.

Colours are Okabe and Ito's, which colour-blind people tell apart, always the same for a mode; line styles and markers
tell apart what a printer makes grey. Bands and bars are 95 % t intervals over seeds; one seed has none. A function that
finds nothing to draw returns a small figure that says so.

    learning_curves(load("runs/modes"), budget="seconds").savefig("curves.png")
"""

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure  # no pyplot: it keeps state that threads would share

from overlaprl_ray.reports.budgets import Budget, Curve, curves
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.statistics import paired

COLOURS = {"sync": "#4D4D4D", "async": "#E69F00", "staleness": "#009E73", "overlap": "#0072B2"}
OTHERS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#4D4D4D", "#B8A900")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 5.4  # inches: fills a column of a paper, and its texts can still be read on a phone
MOST = 8  # settings in one picture: more cannot be told apart by eye
UNITS = {"steps": "steps", "tokens": "generated tokens", "seconds": "wall clock, seconds"}
NAMES = {"reward": "sampled reward (mean of 10 steps)", "accuracy": "held-out accuracy (greedy)"}
FINALS = {"reward": "reward_last_10", "accuracy": "accuracy_final"}  # of `trials`
NOTE = "note"  # the label of a figure that only says why there is nothing to draw


def new_figure(height: float) -> Figure:
    """An empty figure; inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def note(text: str) -> Figure:
    """A figure that says why there is nothing to draw."""
    figure = new_figure(0.8)
    figure.set_label(NOTE)
    figure.text(0.02, 0.5, text, fontsize=9, va="center", wrap=True)
    return figure


def tidy(axes: Axes, x: str, y: str) -> None:
    """Labels with units, and no frame."""
    axes.set(xlabel=x, ylabel=y, axisbelow=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)


def looks(results: Results) -> dict[str, dict[str, str]]:
    """Colour, line and marker of each setting: its mode's colour where modes differ, else a colour of its own."""
    modes = dict(zip(results.settings, results.trials["mode"].dropna(), strict=True))
    several = len(set(modes.values())) > 1
    out = {}
    for place, (label, mode) in enumerate(modes.items()):
        alike = [other for other, of in modes.items() if of == mode]
        colour = COLOURS.get(mode, OTHERS[0]) if several else OTHERS[place % len(OTHERS)]
        line = LINES[(alike.index(label) if several else place // len(OTHERS)) % len(LINES)]
        out[label] = {"color": colour, "ls": line, "marker": MARKERS[place % len(MARKERS)]}
    return out


def by_setting(results: Results, curve_of: dict[str, Curve]) -> dict[str, list[Curve]]:
    """Curves of each setting, one per seed (the first, of repeats): finished runs, or all where none has finished."""
    known = results.trials[results.trials["mode"].notna() & results.trials["trial"].isin(list(curve_of))]
    done = known["status"] == "done"
    known = known[done] if done.any() else known
    table = known[["trial", "seed"]].assign(label=results.settings[known["trial"]].to_numpy())
    groups = table.drop_duplicates(["label", "seed"]).groupby("label", sort=False)["trial"]
    return {str(label): [curve_of[trial] for trial in trials] for label, trials in groups}


def band(seeds: list[Curve], points: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(budget, mean, half width of the 95 % interval) of curves over what all of them cover; None from one seed."""
    if len(seeds) == 1:
        return *seeds[0], None
    start, end = max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds)
    grid = np.linspace(start, max(start, end), points)
    found = paired(pd.DataFrame([np.interp(grid, x, y) for x, y in seeds]))
    return grid, found["mean"].to_numpy(), (found["high"] - found["mean"]).to_numpy()


def learning_curves(results: Results, metric: str = "reward", budget: Budget = "steps") -> Figure:
    """A metric against what was spent, a line per setting with its band over seeds (the best eight of more)."""
    drawn = by_setting(results, curves(results, metric, budget))
    if not drawn:
        return note(f"No run has {NAMES.get(metric, metric)} to draw against {UNITS[budget]}.")
    final = {label: float(np.mean([y[-1] for _, y in seeds])) for label, seeds in drawn.items()}
    shown = sorted(final, key=lambda label: final[label], reverse=True)[:MOST]
    look = looks(results)
    figure = new_figure(3.4)
    axes = figure.subplots()
    means = []
    for place, label in enumerate(name for name in drawn if name in shown):
        x, mean, half = band(drawn[label])
        means.append(mean)
        width = 2.8 - 1.6 * place / max(1, len(shown) - 1)  # a line under an identical one shows at its edges
        marker = look[label]["marker"] if metric == "accuracy" and half is None else ""
        style: dict[str, Any] = {**look[label], "lw": width, "marker": marker, "ms": 4}
        axes.plot(x, mean, label=f"{label} (n {len(drawn[label])})", **style)
        if half is not None:
            axes.fill_between(x, mean - half, mean + half, color=look[label]["color"], alpha=0.15, lw=0)
    tidy(axes, UNITS[budget], NAMES.get(metric, metric))
    limit(axes.set_ylim, axes.get_ylim(), np.concatenate(means))
    legend(figure, axes)
    several = any(len(seeds) > 1 for seeds in drawn.values())
    title = "Mean and 95 % band over n seeds" if several else "One seed each: no interval"
    axes.set_title(title + (f"; best {MOST} of {len(drawn)} settings" if len(drawn) > MOST else ""), fontsize=10)
    return figure


def limit(setter: Callable[..., Any], now: tuple[float, float], means: np.ndarray | pd.Series) -> None:
    """Cut an axis to the means' range and as much again: wide intervals of few seeds must not flatten the curves."""
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    room = (high - low) / 2 or 0.1 * abs(high) or 1.0
    setter(max(now[0], low - room), min(now[1], high + room))


def legend(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """Below the axes, where it hides nothing; the figure grows by what it takes."""
    handles, texts = axes.get_legend_handles_labels()
    ncols = 1 if max((len(text) for text in texts), default=0) > 34 else columns
    texts = [wrap(text, 74) for text in texts]
    lines = sum(text.count("\n") + 1 for text in texts) / ncols
    figure.set_figheight(figure.get_figheight() + 0.19 * lines + 0.1)
    figure.legend(handles, texts, loc="outside lower center", ncols=ncols, fontsize=8.5, frameon=False)


def wrap(text: str, width: int) -> str:
    """A long label in lines, broken where a setting ends if it can be."""
    glued = re.sub(r"(?<=[^,]) ", "\u00a0", text)  # a name stays with its value
    return textwrap.fill(glued, width, break_long_words=False, break_on_hyphens=False).replace("\u00a0", " ")


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other one beats in both coordinates (as good in one, better in the other), by the first."""
    out: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not out or y > out[-1][1]:
            out.append((x, y))
    return out[::-1]


def throughput(results: Results, metric: str = "reward") -> Figure:
    """Final reward (or accuracy) against tokens per second after warm-up, with intervals and the Pareto front."""
    done = results.done.trials.dropna(subset=[FINALS[metric], "steps_per_s", "tokens"])
    if done.empty:
        return note(f"No finished run has a final {metric} and a speed to draw.")
    table = pd.DataFrame({"label": results.settings[done["trial"]].to_numpy(), "seed": done["seed"].to_numpy()})
    table["x"] = (done["steps_per_s"] * done["tokens"] / done["steps"]).to_numpy()
    table["y"] = done[FINALS[metric]].to_numpy()
    seeds = table.groupby(["label", "seed"], sort=False).mean().unstack("label")
    x, y = (paired(seeds[name]) for name in ("x", "y"))
    reach = {name: (found["high"] - found["mean"]).fillna(0.0) for name, found in (("xerr", x), ("yerr", y))}
    front = pareto_front(zip(x["mean"], y["mean"], strict=True))
    figure = new_figure(3.4)
    axes = figure.subplots()
    for label, look in looks(results).items():
        if label in x.index:
            point = (x["mean"][label], y["mean"][label])
            name = f"{label} (n {x['n'][label]})" if len(x) <= 2 * MOST or point in front else None
            style: dict[str, Any] = {**look, "ls": "", **{side: half[label] for side, half in reach.items()}}
            axes.errorbar(point[0], point[1], ms=6, capsize=2, lw=1, label=name, **style)
    limit(axes.set_xlim, axes.get_xlim(), x["mean"])
    limit(axes.set_ylim, axes.get_ylim(), y["mean"])
    axes.plot(*zip(*front, strict=True), color="#888888", lw=1, ls="--", zorder=1, label="Pareto front of the means")
    tidy(axes, "generated tokens per second", f"final {NAMES[metric]}")
    axes.set_title("Faster to the right, better to the top; bars: 95 % over seeds", fontsize=10)
    legend(figure, axes)
    return figure


def pairs(table: pd.DataFrame, first: str, second: str) -> Figure:
    """`compare_sweeps`' differences as dots with their intervals, a line per setting (the first two dozen)."""
    rows = table[table["n"] > 0].head(24)
    if rows.empty:
        return note("No setting with a seed in common: nothing to draw.")
    names = [wrap(name, 34) for name in rows["setting"]]
    figure = new_figure(0.1 * len(rows) + 0.17 * sum(name.count("\n") + 1 for name in names) + 1.1)
    axes = figure.subplots()
    reach = (rows["high"] - rows["difference"]).fillna(0.0)
    axes.errorbar(rows["difference"], range(len(rows)), xerr=reach, ls="", marker="o", color=OTHERS[0], capsize=2)
    axes.axvline(0, color="#888888", lw=1)
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    tidy(axes, f"{table.attrs['metric']}, {second} - {first} (95 % over seeds; none from one)", "")
    return figure
