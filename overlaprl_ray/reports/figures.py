"""Figures of a study: what was learned, how fast, at what speed. reports/staleness_figures.py has those on staleness.

Colours are Okabe and Ito's, which colour-blind people tell apart, always the same for a mode; line styles and markers
tell apart what a printer makes grey. Bands and bars are 95 % t intervals over seeds; one seed has none. A function that
finds nothing to draw returns a small figure that says so.

    learning_curves(load("runs/modes"), budget="seconds").savefig("curves.png")
"""

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure  # no pyplot: it keeps state that threads would share

from overlaprl_ray.reports.budgets import Budget, Curve, curves
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.statistics import interval, paired_columns
from overlaprl_ray.reports.trials import labels, varying

COLOURS = {"sync": "#4D4D4D", "async": "#E69F00", "staleness": "#009E73", "overlap": "#0072B2"}
OTHERS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#4D4D4D", "#B8A900")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 5.4  # inches: fills a column of a paper, and its texts can still be read on a phone
MOST = 8  # settings in one picture: more cannot be told apart by eye
UNITS = {"steps": "steps", "tokens": "generated tokens", "seconds": "wall clock, seconds"}
NAMES = {"reward": "sampled reward (mean of 10 steps)", "accuracy": "held-out accuracy (greedy)"}
NOTE = "note"  # the label of a figure that only says why there is nothing to draw


@dataclass(frozen=True)
class Look:
    """How a setting looks in every figure."""

    colour: str
    line: str
    marker: str


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; inches."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def note(text: str) -> Figure:
    """A figure that says why there is nothing to draw."""
    figure = new_figure(WIDTH, 0.8)
    figure.set_label(NOTE)
    figure.text(0.02, 0.5, text, fontsize=9, va="center", wrap=True)
    return figure


def tidy(axes: Axes, x: str, y: str) -> None:
    """Labels with units, and no frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)


def looks(results: Results) -> dict[str, Look]:
    """A look for each setting: its mode's colour where modes differ, else a colour of its own."""
    known = results.trials[results.trials["mode"].notna()]
    names = labels(known, varying(results.trials))
    modes = dict(zip(names, known["mode"], strict=True))
    several = len(set(modes.values())) > 1
    out = {}
    for place, (label, mode) in enumerate(modes.items()):
        alike = [other for other, of in modes.items() if of == mode]
        colour = COLOURS.get(mode, OTHERS[0]) if several else OTHERS[place % len(OTHERS)]
        line = LINES[(alike.index(label) if several else place // len(OTHERS)) % len(LINES)]
        out[label] = Look(colour, line, MARKERS[place % len(MARKERS)])
    return out


def settings_of(results: Results, table: pd.DataFrame) -> pd.Categorical:
    """The setting of each row of a table, by its `trial`; missing where the trial has none."""
    known = results.trials[results.trials["mode"].notna()]
    label_of = dict(zip(known["trial"], labels(known, varying(results.trials)), strict=True))
    settings = list(dict.fromkeys(label_of.values()))
    trial = table["trial"].astype("category").cat
    place = {label: code for code, label in enumerate(settings)}
    codes = np.array([place.get(label_of.get(name, ""), -1) for name in trial.categories] + [-1], dtype=np.int64)
    return pd.Categorical.from_codes(codes[trial.codes.to_numpy()], categories=settings)  # code -1 is the last


def by_setting(results: Results, curve_of: dict[str, Curve]) -> dict[str, list[Curve]]:
    """Curves of each setting, one per seed (the first, of repeats): finished runs, or all where none has finished."""
    known = results.trials[results.trials["mode"].notna() & results.trials["trial"].isin(list(curve_of))]
    names = labels(known, varying(results.trials))
    done = known["status"] == "done"
    known, names = (known[done], names[done]) if done.any() else (known, names)
    first = ~pd.DataFrame({"label": names, "seed": known["seed"]}).duplicated()
    out: dict[str, list[Curve]] = {}
    for label, trial in zip(names[first], known["trial"][first], strict=True):
        out.setdefault(label, []).append(curve_of[trial])
    return out


def band(seeds: list[Curve], points: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(budget, mean, half width of the 95 % interval) of curves over what all of them cover; None from one seed."""
    start, end = max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds)
    if len(seeds) == 1:
        return *seeds[0], None
    grid = np.linspace(start, max(start, end), points)
    values = np.stack([np.interp(grid, x, y) for x, y in seeds])
    found = paired_columns(values)
    return grid, found["mean"], found["high"] - found["mean"]


def learning_curves(results: Results, metric: str = "reward", budget: Budget = "steps") -> Figure:
    """A metric against what was spent, a line per setting with its band over seeds (the best eight of more)."""
    drawn = by_setting(results, curves(results, metric, budget))
    if not drawn:
        return note(f"No run has {NAMES.get(metric, metric)} to draw against {UNITS[budget]}.")
    final = {label: float(np.mean([y[-1] for _, y in seeds])) for label, seeds in drawn.items()}
    shown = sorted(final, key=lambda label: final[label], reverse=True)[:MOST]
    look = looks(results)
    figure = new_figure(WIDTH, 3.4)
    axes = figure.subplots()
    means = []
    for place, label in enumerate(name for name in drawn if name in shown):
        x, mean, half = band(drawn[label])
        means.append(mean)
        width = 2.8 - 1.6 * place / max(1, len(shown) - 1)  # a line under an identical one shows at its edges
        style: dict[str, Any] = {"color": look[label].colour, "ls": look[label].line, "lw": width}
        if metric == "accuracy" and half is None:
            style |= {"marker": look[label].marker, "ms": 4}
        axes.plot(x, mean, label=f"{label} (n {len(drawn[label])})", **style)
        if half is not None:
            axes.fill_between(x, mean - half, mean + half, color=look[label].colour, alpha=0.15, lw=0)
    tidy(axes, UNITS[budget], NAMES.get(metric, metric))
    _limit(axes.set_ylim, axes.get_ylim(), np.concatenate(means))
    legend(figure, axes)
    more = f"; best {MOST} of {len(drawn)} settings" if len(drawn) > MOST else ""
    several = any(len(seeds) > 1 for seeds in drawn.values())
    axes.set_title(
        f"{'Mean and 95 % band over n seeds' if several else 'One seed each: no interval'}{more}", fontsize=10
    )
    return figure


def _limit(setter: Callable[..., Any], now: tuple[float, float], means: np.ndarray) -> None:
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
    column = {"reward": "reward_last_10", "accuracy": "accuracy_final"}[metric]
    done = results.done.trials
    if done[[column, "steps_per_s", "tokens"]].dropna().empty:
        return note(f"No finished run has a final {metric} and a speed to draw.")
    names = labels(done, varying(results.trials))
    speed = done["steps_per_s"] * done["tokens"] / done["steps"]
    table = pd.DataFrame({"label": names, "seed": done["seed"], "x": speed, "y": done[column]}).dropna()
    table = table.groupby(["label", "seed"], sort=False).mean().reset_index()
    look = looks(results)
    figure = new_figure(WIDTH, 3.4)
    axes = figure.subplots()
    found = {
        str(label): [interval(rows[c].to_numpy()) for c in ("x", "y")]
        for label, rows in table.groupby("label", sort=False)
    }
    front = pareto_front([(x.mean, y.mean) for x, y in found.values()])
    for label, (x, y) in found.items():
        bars: dict[str, Any] = {"xerr": x.mean - x.low, "yerr": y.mean - y.low} if x.n > 1 else {}
        style: dict[str, Any] = {"color": look[label].colour, "marker": look[label].marker, "ls": ""}
        named = len(found) <= 2 * MOST or (x.mean, y.mean) in front
        axes.errorbar(
            x.mean, y.mean, ms=6, capsize=2, lw=1, label=f"{label} (n {x.n})" if named else None, **style, **bars
        )
    _limit(axes.set_xlim, axes.get_xlim(), np.array([x.mean for x, _ in found.values()]))
    _limit(axes.set_ylim, axes.get_ylim(), np.array([y.mean for _, y in found.values()]))
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
    lines = sum(wrap(name, 34).count("\n") + 1 for name in rows["setting"])
    figure = new_figure(WIDTH, 0.1 * len(rows) + 0.17 * lines + 1.1)
    axes = figure.subplots()
    reach = (rows["high"] - rows["difference"]).fillna(0.0)
    axes.errorbar(rows["difference"], range(len(rows)), xerr=reach, ls="", marker="o", color=OTHERS[0], capsize=2)
    axes.axvline(0, color="#888888", lw=1)
    axes.set_yticks(range(len(rows)), [wrap(name, 34) for name in rows["setting"]], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    tidy(axes, f"{table.attrs['metric']}, {second} - {first} (95 % over seeds; none from one)", "")
    return figure
