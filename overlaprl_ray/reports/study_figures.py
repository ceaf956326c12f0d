"""Figures of a study of lags, rates, rules and thresholds; the outcome is the area (see reports/study.py).

Accuracy over seconds is `figures.learning_curves(results, "accuracy", "seconds")`.

    outcome_map(load("analysis/results/e1"), "grpo.lr", "pipeline.lag").savefig("surface.png")
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from overlaprl_ray.reports.figures import MARKERS, OTHERS, legend, new_figure, note, tidy, wrap
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.staleness_figures import heat
from overlaprl_ray.reports.statistics import paired
from overlaprl_ray.reports.study import RATE, outcomes
from overlaprl_ray.reports.trials import labels, shown, varying

AREA = "area: mean held-out accuracy after step 0"
AXES = {
    RATE: "learning rate",
    "pipeline.lag": "lag, versions",
    "staleness.kl_fresh": "kl_fresh, nats per token",
    "staleness.kl_stale": "kl_stale, nats per token",
}
PANELS = 6  # maps in one picture


def best_rate(results: Results) -> Figure:
    """The learning rate with the highest area against the lag: mean of the seeds' own best rates, on a log scale."""
    trials = outcomes(results).dropna(subset=["area"])
    if trials["lag"].nunique() < 2 or trials[RATE].nunique() < 2:
        return note("Fewer than two lags or two learning rates among the finished runs: no best rate to draw.")
    panels = labels(trials, [name for name in varying(trials) if name not in (RATE, "pipeline.lag", "pipeline.mode")])
    figure = new_figure(3.4)
    axes = figure.subplots()
    for place, (label, part) in enumerate(trials.groupby(panels, sort=False)):
        areas = part.pivot_table(index=["seed", "lag"], columns=RATE, values="area")
        found = paired(np.log2(areas.idxmax(axis=1)).unstack("lag"))
        x, middle = 1 + found.index.to_numpy(np.float64), np.exp2(found["mean"])
        low, high = (np.exp2(found[side].fillna(found["mean"])) for side in ("low", "high"))
        axes.errorbar(x, middle, yerr=[middle - low, high - middle], color=OTHERS[place % len(OTHERS)], capsize=2,
                      marker=MARKERS[place % len(MARKERS)], label=f"{label} ({_count(found['n'])})")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lags = sorted(trials["lag"].unique())
    axes.set_xticks([1 + lag for lag in lags], [shown(lag) for lag in lags])
    rates = sorted(trials[RATE].unique())
    axes.set_yticks(rates, [shown(rate) for rate in rates])
    axes.minorticks_off()
    tidy(axes, "lag, versions (spaced as 1 + lag)", "best learning rate")
    axes.set_title("Geometric mean of the seeds' best rates, 95 % t interval", fontsize=10)
    legend(figure, axes)
    return figure


def outcome_map(results: Results, x: str, y: str) -> Figure:
    """The area over two settings, as mean ± half the 95 % interval over seeds; a map for each of the other settings."""
    trials = outcomes(results).dropna(subset=["area"])
    if not {x, y} <= {*trials} or len(trials[[x, y]].drop_duplicates()) < 2:
        return note(f"Fewer than two pairs of {x} and {y} among the finished runs: no map to draw.")
    others = [name for name in varying(trials) if name not in (x, y)]
    panels = labels(trials, others)
    drawn = list(panels.unique())[:PANELS]
    figure = new_figure((0.5 * trials[y].nunique() + 1.3) * ((len(drawn) + 1) // 2) + 0.4)
    grid = figure.subplots((len(drawn) + 1) // 2, 2 if len(drawn) > 1 else 1, squeeze=False)
    limits = {"vmin": trials["area"].min(), "vmax": trials["area"].max()}
    for axes, label in zip(grid.flat, drawn, strict=False):
        seeds = trials[panels == label].pivot_table(index="seed", columns=[y, x], values="area")
        found = paired(seeds)
        half = (found["high"] - found["mean"]).map("\n± {:.3f}".format).where(found["low"].notna(), "")
        texts = found["mean"].map("{:.3f}".format) + half
        heat(axes, texts.unstack(), found["mean"].unstack(), **limits)
        head = wrap(label, 36) + "\n" if others else ""
        axes.set_title(f"{head}{AREA if len(drawn) == 1 else 'area'}, {_count(found['n'])}", fontsize=9)
        axes.set_xlabel(AXES.get(x, x), fontsize=9)
        axes.set_ylabel(AXES.get(y, y), fontsize=9)
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)
    return figure


def rules_at_rates(results: Results, rate: float) -> Figure:
    """Each rule's area at its own best rate and at `rate`, lag 0's best: what it is worth where nobody tuned."""
    trials = outcomes(results).dropna(subset=["area"])
    if trials.empty or not (trials[RATE] == rate).any():
        return note(f"No finished run has the learning rate {rate:g}: nothing to draw.")
    rules = labels(trials, [name for name in varying(trials) if name != RATE])
    names = list(rules.unique())
    figure = new_figure(0.4 * len(names) + 1.4)
    axes = figure.subplots()
    own = {}  # rule -> the rate that is best for it
    for name, part in trials.groupby(rules):
        own[name] = part.groupby(RATE)["area"].mean().idxmax()
    for place, (kind, keep) in enumerate({
        "at its own best rate": trials[RATE] == rules.map(own), f"at rate {rate:g}": trials[RATE] == rate,
    }.items()):  # fmt: skip
        part = trials[keep].assign(rule=rules[keep])
        found = paired(part.pivot_table(index="seed", columns="rule", values="area").reindex(columns=names))
        reach = (found["high"] - found["mean"]).fillna(0.0)
        axes.errorbar(found["mean"], np.arange(len(names)) + 0.2 * place - 0.1, xerr=reach, ls="", capsize=2,
                      color=OTHERS[place], marker=MARKERS[place], label=f"{kind} ({_count(found['n'])})")  # fmt: skip
    axes.set_yticks(range(len(names)), [wrap(str(name), 34) for name in names], fontsize=8.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    tidy(axes, f"{AREA} (95 % t interval)", "")
    legend(figure, axes)
    return figure


def _count(n: pd.Series) -> str:
    known = n[n > 0]
    return f"n {known.min()}" if known.min() == known.max() else f"n {known.min()} to {known.max()}"
