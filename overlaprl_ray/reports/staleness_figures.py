"""Figures about staleness: thresholds, decisions over time, KL against lag, and who gets discarded.

threshold_map(load("runs/thresholds")).savefig("thresholds.png")
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from overlaprl_ray.reports.figures import (
    MARKERS,
    MOST,
    WIDTH,
    legend,
    looks,
    new_figure,
    note,
    settings_of,
    tidy,
    wrap,
)
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.run_files import BINS, DECISIONS, TRAITS
from overlaprl_ray.reports.trials import labels, shown, varying

COLOURS = {"fresh": "#56B4E9", "stale": "#F0E442", "discard": "#D55E00"}
HATCHES = {"fresh": "", "stale": "////", "discard": "xxxx"}
TITLES = {
    "length": "completion length, share of the longest allowed",
    "reward": "reward, share of full marks",
    "difficulty": "how well the prompt's group did (0 %: nobody solved it)",
    "lag": "lag, versions",
}
THRESHOLDS = ["staleness.kl_fresh", "staleness.kl_stale"]
FLOOR = 1e-8  # nats: below it a KL is rounding error (lag 0) and is not drawn


def judged(results: Results) -> Results:
    """The runs in which a rule judged rollouts."""
    return results.of(results.trials["rule"].notna() & (results.trials["rule"] != "none"))


def threshold_map(results: Results, metric: str = "reward") -> Figure:
    """kl_fresh × kl_stale: final reward (or accuracy) and share of steps discarded, mean over seeds, a row per lag."""
    column = {"reward": "reward_last_10", "accuracy": "accuracy_final"}[metric]
    trials = judged(results).done.trials
    if (
        not {column, "decisions.discard", *THRESHOLDS} <= set(trials.columns)
        or len(trials[THRESHOLDS].drop_duplicates()) < 2
    ):
        return note("Fewer than two pairs of kl_fresh and kl_stale among the finished runs: no map to draw.")
    others = [name for name in varying(trials) if name not in THRESHOLDS]
    panels = labels(trials, others)
    rows = list(panels.drop_duplicates())[:4]
    figure = new_figure(WIDTH, 2.9 * len(rows) + 0.3)
    grid = figure.subplots(len(rows), 2, squeeze=False)
    trials = trials.assign(_discarded=trials["decisions.discard"] / trials["steps"])
    for axes, label in zip(grid, rows, strict=True):
        part = trials[panels == label]
        seeds = part.groupby(THRESHOLDS)["seed"].nunique()
        count = f"n {seeds.min()}" if seeds.min() == seeds.max() else f"n {seeds.min()} to {seeds.max()}"
        head = wrap(label, 36) + "\n" if others else ""
        _heat(axes[0], part, column, f"{head}final {metric}, {count}", "viridis", None)
        _heat(axes[1], part, "_discarded", f"{head}share of steps discarded", "cividis", (0.0, 1.0))
    return figure


def _heat(
    axes: Axes, part: pd.DataFrame, column: str, title: str, colours: str, limits: tuple[float, float] | None
) -> None:
    """One map: thresholds in order, each with its mean written in; pairs that were not run stay hatched."""
    by_seed = part.groupby([*THRESHOLDS, "seed"])[column].mean()
    table = by_seed.groupby(level=[0, 1]).mean().unstack(0)  # rows kl_stale, columns kl_fresh
    low, high = limits or (float(np.nanmin(table)), float(np.nanmax(table)))
    axes.set_facecolor("white")
    axes.patch.set(hatch="///", edgecolor="#BBBBBB")
    image = axes.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="lower")
    for (row, place), value in np.ndenumerate(table.to_numpy()):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
            axes.text(
                place,
                row,
                f"{value:.3f}" if limits is None else f"{value:.0%}",
                ha="center",
                va="center",
                color=ink,
                fontsize=9,
            )
    axes.set_xticks(range(len(table.columns)), [shown(value) for value in table.columns], fontsize=8.5)
    axes.set_yticks(range(len(table.index)), [shown(value) for value in table.index], fontsize=8.5)
    axes.set_xlabel("kl_fresh, nats per token", fontsize=9)
    axes.set_ylabel("kl_stale, nats per token", fontsize=9)
    axes.set_title(title, fontsize=9.5)


def decisions_over_time(results: Results) -> Figure:
    """Shares of fresh, stale and discarded rows by step, mean over seeds and ten steps; a panel per judging setting."""
    kept = judged(results)
    columns = [f"staleness/frac_{name}" for name in ("fresh", "stale", "discarded")]
    if kept.history.empty or not set(columns) <= set(kept.history.columns):
        return note("No run with a staleness rule and steps: no decisions to draw.")
    history = kept.history[["step", *columns]].assign(label=settings_of(results, kept.history))
    fired = history.groupby("label", observed=True)[columns[1:]].mean().sum(axis=1)
    picked = list(fired.nlargest(MOST).index)
    means = history[history["label"].isin(picked)].groupby(["label", "step"], observed=True)[columns].mean()
    drawn = [label for label in fired.index if label in picked]
    rows = (len(picked) + 1) // 2
    titles = [wrap(name, 36) for name in drawn]
    most = max(title.count("\n") for title in titles)
    figure = new_figure(WIDTH, (1.7 + 0.13 * most) * rows + 0.5)
    grid = figure.subplots(rows, 2, squeeze=False, sharey=True)
    for axes, name, title in zip(grid.flat, drawn, titles, strict=False):
        smooth = means.loc[name].rolling(10, min_periods=1).mean()
        _stack(axes, smooth, columns)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("step", fontsize=9)
    for axes in grid.flat[len(picked) :]:
        axes.set_visible(False)
    more = f"\nthe {MOST} of {len(fired)} settings that judge most harshly" if len(fired) > MOST else ""
    for axes in grid[:, 0]:
        axes.set_ylabel("share of rows", fontsize=9)
    figure.suptitle(f"Mean over ten steps and over seeds{more}", fontsize=9)
    legend(figure, grid[0, 0], columns=3)
    return figure


def _stack(axes: Axes, shares: pd.DataFrame, columns: list[str]) -> None:
    bottom = np.zeros(len(shares))
    for name, column in zip(DECISIONS, columns, strict=True):
        top = bottom + shares[column].to_numpy()
        style: dict[str, Any] = {"facecolor": COLOURS[name], "hatch": HATCHES[name], "edgecolor": "white", "lw": 0}
        axes.fill_between(shares.index.to_numpy(), bottom, top, label=name, **style)
        bottom = top
    axes.set(ylim=(0, 1), xlim=(shares.index[0], max(shares.index[-1], shares.index[0] + 1)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)


def kl_against_lag(results: Results) -> Figure:
    """KL between the policy that generated a batch and the one that meets it, by how many versions lie between them."""
    columns = ["staleness/lag", "staleness/kl"]
    history = results.history
    if not set(columns) <= set(history.columns) or history[columns].dropna().empty:
        return note("No run has measured KL(μ‖π): nothing to draw against the lag.")
    table = history[columns].assign(label=settings_of(results, history)).dropna()
    table = table[table["staleness/kl"] > FLOOR]
    if table.empty:
        return note("All measured KL(μ‖π) is rounding: nothing was generated with other weights.")
    look = looks(results)
    there = set(table["label"])
    drawn = [label for label in look if label in there][:MOST]
    figure = new_figure(WIDTH, 3.4)
    axes = figure.subplots()
    for place, label in enumerate(drawn):
        by_lag = table[table["label"] == label].groupby("staleness/lag")["staleness/kl"].quantile([0.25, 0.5, 0.75])
        low, middle, high = (by_lag.xs(q, level=1) for q in (0.25, 0.5, 0.75))
        x = middle.index.to_numpy(np.float64) + 0.06 * (place - (len(drawn) - 1) / 2)
        style: dict[str, Any] = {"color": look[label].colour, "marker": MARKERS[place], "ls": look[label].line}
        reach = np.stack([middle - low, high - middle])
        axes.errorbar(x, middle, yerr=reach, ms=5, lw=1, capsize=2, label=label, **style)
    axes.set_yscale("log")
    tidy(axes, "lag, versions between generation and training", "KL(μ‖π), nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    more = f"; first {MOST} of {len(there)} settings" if len(there) > MOST else ""
    axes.set_title(f"Median and quartiles of steps and seeds{more}\nrounding error (lag 0) left out", fontsize=9.5)
    legend(figure, axes)
    return figure


def who_gets_discarded(results: Results) -> Figure:
    """Shares of fresh, stale and discarded rows by length, reward, difficulty and lag: what a rule selects."""
    table = judged(results).decisions
    if table.empty:
        return note("No run with a staleness rule has counted its decisions by length, reward and difficulty.")
    lags = sorted(table[table["trait"] == "lag"]["bin"].unique(), key=int)[:12]
    heights = [4, 4, 4, len(lags)]
    figure = new_figure(WIDTH, 0.24 * sum(heights) + 2.3)
    grid = figure.subplots(4, 1, height_ratios=heights)
    for axes, trait in zip(grid, TRAITS, strict=True):
        counts = table[table["trait"] == trait].groupby(["bin", "decision"], observed=True)["rows"].sum().unstack()
        _shares(axes, counts.reindex(index=lags if trait == "lag" else BINS, columns=list(DECISIONS)).fillna(0))
        axes.set_title(TITLES[trait], fontsize=9.5, loc="left")
    grid[-1].set_xlabel("share of rows (number at the right), runs that judge", fontsize=9.5)
    legend(figure, grid[0], columns=3)
    return figure


def _shares(axes: Axes, counts: pd.DataFrame) -> None:
    """A bar per row of counts, from 0 to 1; a bin without rows has none."""
    totals = counts.sum(axis=1).to_numpy()
    left = np.zeros(len(counts))
    for name in DECISIONS:
        width = counts[name].to_numpy() / np.maximum(totals, 1)
        style: dict[str, Any] = {"facecolor": COLOURS[name], "hatch": HATCHES[name], "edgecolor": "white", "lw": 0}
        axes.barh(range(len(counts)), width, left=left, height=0.75, label=name, **style)
        left = left + width
    for place, total in enumerate(totals):
        axes.text(1.01, place, f"{int(total):,}", va="center", fontsize=8, color="#555555")
    axes.set_yticks(range(len(counts)), list(counts.index), fontsize=8.5)
    axes.set(xlim=(0, 1), ylim=(len(counts) - 0.5, -0.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", left=False)
