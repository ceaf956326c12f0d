"""Figures about staleness: thresholds, decisions over time, KL against lag, and who gets discarded.

threshold_map(load("runs/thresholds")).savefig("thresholds.png")
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from overlaprl_ray.reports.figures import FINALS, MOST, legend, looks, new_figure, note, tidy, wrap
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.run_files import DECISIONS, TRAITS
from overlaprl_ray.reports.trials import labels, shown, varying
from overlaprl_ray.runs.summary import BINS

COLOURS = {"fresh": "#56B4E9", "stale": "#F0E442", "discard": "#D55E00"}
HATCHES = {"fresh": "", "stale": "////", "discard": "xxxx"}
SHARES = {"staleness/frac_fresh": "fresh", "staleness/frac_stale": "stale", "staleness/frac_discarded": "discard"}
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
    trials = judged(results).done.trials
    if not {*THRESHOLDS} <= {*trials} or len(trials[THRESHOLDS].drop_duplicates()) < 2:
        return note("Fewer than two pairs of kl_fresh and kl_stale among the finished runs: no map to draw.")
    others = [name for name in varying(trials) if name not in THRESHOLDS]
    panels = labels(trials, others)
    rows = list(panels.unique())[:4]
    figure = new_figure(2.9 * len(rows) + 0.3)
    grid = figure.subplots(len(rows), 2, squeeze=False)
    trials = trials.assign(_discarded=trials["decisions.discard"] / trials["steps"])
    for axes, label in zip(grid, rows, strict=True):
        part = trials[panels == label].groupby([*THRESHOLDS, "seed"])[[FINALS[metric], "_discarded"]].mean()
        seeds = part.groupby(THRESHOLDS).size()
        count = f"n {seeds.min()}" if seeds.min() == seeds.max() else f"n {seeds.min()} to {seeds.max()}"
        head = wrap(label, 36) + "\n" if others else ""
        means = part.groupby(THRESHOLDS).mean().unstack(THRESHOLDS[0])  # rows kl_stale, columns kl_fresh
        heat(axes[0], means[FINALS[metric]].map("{:.3f}".format), means[FINALS[metric]])
        heat(axes[1], means["_discarded"].map("{:.0%}".format), means["_discarded"], cmap="cividis", vmin=0, vmax=1)
        axes[0].set_title(f"{head}final {metric}, {count}", fontsize=9.5)
        axes[1].set_title(f"{head}share of steps discarded", fontsize=9.5)
        for one in axes:
            one.set_xlabel("kl_fresh, nats per token", fontsize=9)
            one.set_ylabel("kl_stale, nats per token", fontsize=9)
    return figure


def heat(axes: Axes, texts: pd.DataFrame, values: pd.DataFrame, **colours: Any) -> None:
    """A map of a table with each cell's text written in; what was not run stays hatched."""
    axes.patch.set(hatch="///", edgecolor="#BBBBBB")
    image = axes.imshow(values, aspect="auto", origin="lower", **{"cmap": "viridis", **colours})
    for (row, column), value in np.ndenumerate(values.to_numpy()):
        if np.isfinite(value):
            ink = "black" if np.dot(image.cmap(image.norm(value))[:3], (0.3, 0.6, 0.1)) > 0.5 else "white"
            axes.text(column, row, texts.iloc[row, column], ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(values.columns)), [shown(value) for value in values.columns], fontsize=8.5)
    axes.set_yticks(range(len(values.index)), [shown(value) for value in values.index], fontsize=8.5)


def decisions_over_time(results: Results) -> Figure:
    """Shares of fresh, stale and discarded rows by step, mean over seeds and ten steps; a panel per judging setting."""
    history = judged(results).history
    if history.empty or not {*SHARES} <= {*history}:
        return note("No run with a staleness rule and steps: no decisions to draw.")
    history = history.assign(label=history["trial"].astype("str").map(results.settings)).rename(columns=SHARES)
    fired = history.groupby("label", sort=False)[["stale", "discard"]].mean().sum(axis=1)
    picked = set(fired.nlargest(MOST).index)
    means = history.groupby(["label", "step"])[list(DECISIONS)].mean()
    titles = {name: wrap(name, 36) for name in fired.index if name in picked}
    rows = (len(picked) + 1) // 2
    figure = new_figure((1.7 + 0.13 * max(title.count("\n") for title in titles.values())) * rows + 0.5)
    grid = figure.subplots(rows, 2, squeeze=False, sharey=True)
    for axes, (name, title) in zip(grid.flat, titles.items(), strict=False):
        smooth = means.loc[name].rolling(10, min_periods=1).mean()
        tops = smooth.cumsum(axis=1)
        for kind in DECISIONS:
            style: dict[str, Any] = {"facecolor": COLOURS[kind], "hatch": HATCHES[kind], "edgecolor": "white", "lw": 0}
            axes.fill_between(smooth.index, tops[kind] - smooth[kind], tops[kind], label=kind, **style)
        axes.set(ylim=(0, 1), xlim=(smooth.index[0], max(smooth.index[-1], smooth.index[0] + 1)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("step", fontsize=9)
    for axes in grid.flat[len(picked) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("share of rows", fontsize=9)
    more = f"\nthe {MOST} of {len(fired)} settings that judge most harshly" if len(fired) > MOST else ""
    figure.suptitle(f"Mean over ten steps and over seeds{more}", fontsize=9)
    legend(figure, grid[0, 0], columns=3)
    return figure


def kl_against_lag(results: Results) -> Figure:
    """KL between the policy that generated a batch and the one that meets it, by how many versions lie between them."""
    lag, kl = "staleness/lag", "staleness/kl"
    table = results.history.reindex(columns=["trial", lag, kl]).dropna()
    if table.empty:
        return note("No run has measured KL(μ‖π): nothing to draw against the lag.")
    table = table[table[kl] > FLOOR]
    if table.empty:
        return note("All measured KL(μ‖π) is rounding: nothing was generated with other weights.")
    found = table.groupby([table["trial"].astype("str").map(results.settings), lag])[kl].quantile([0.25, 0.5, 0.75])
    by_label = {label: rows.droplevel(0).unstack() for label, rows in found.groupby(level=0)}
    there = {label: look for label, look in looks(results).items() if label in by_label}
    drawn = list(there.items())[:MOST]
    figure = new_figure(3.4)
    axes = figure.subplots()
    for place, (label, look) in enumerate(drawn):
        low, middle, high = by_label[label].to_numpy(np.float64).T
        x = by_label[label].index.to_numpy(np.float64) + 0.06 * (place - (len(drawn) - 1) / 2)
        style: dict[str, Any] = {"ms": 5, "lw": 1, "capsize": 2, "label": label, **look}
        axes.errorbar(x, middle, yerr=[middle - low, high - middle], **style)
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
    figure = new_figure(0.24 * sum(heights) + 2.3)
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
    totals = counts.sum(axis=1)
    widths = counts.div(totals.clip(lower=1), axis=0)
    ends = widths.cumsum(axis=1)
    for name in DECISIONS:
        style: dict[str, Any] = {"facecolor": COLOURS[name], "hatch": HATCHES[name], "edgecolor": "white", "lw": 0}
        axes.barh(range(len(counts)), widths[name], left=ends[name] - widths[name], height=0.75, label=name, **style)
    for place, total in enumerate(totals):
        axes.text(1.01, place, f"{int(total):,}", va="center", fontsize=8, color="#555555")
    axes.set_yticks(range(len(counts)), list(counts.index), fontsize=8.5)
    axes.set(xlim=(0, 1), ylim=(len(counts) - 0.5, -0.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", left=False)
