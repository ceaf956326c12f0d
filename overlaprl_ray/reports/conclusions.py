"""What a study shows in sentences, and what it does not: written from its numbers, so that it fits any sweep.

print(conclusion(load("runs/modes")))
print(conclusion(load("runs/rules"), baseline=best_plain(load("runs/rules"))))
"""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from overlaprl_ray.reports.budgets import Budget
from overlaprl_ray.reports.comparison import by_seed, compare, default_baseline, find_setting
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.trials import labels, varying

FEW = 5  # seeds: below that an interval is wide, and nearly nothing can be told apart
MOST = 6  # settings named of each verdict
VERDICTS = {
    "higher": "higher", "lower": "lower", "cannot be told apart": "cannot be told apart from it",
    "identical": "identical to it in every pair", "one pair: no interval": "one pair only, so nothing is shown",
    "no common seed": "no seed in common, so nothing can be said",
}  # fmt: skip
NAMES = {"reward": "sampled reward (mean of ten steps)", "accuracy": "held-out accuracy"}
FINAL = {"reward": "reward_last_10", "accuracy": "accuracy_final"}


def best_plain(results: Results, metric: str = "reward") -> str | None:
    """The setting without a staleness rule that ended best: what a rule has to beat. None where there is none."""
    done = results.done.trials
    if done.empty:
        return None
    table = by_seed(results, done.set_index("trial")[FINAL[metric]])
    known = results.trials[results.trials["rule"] == "none"]
    plain = set(labels(known, varying(results.trials)))
    means = table[[name for name in table if name in plain]].mean()
    return None if means.empty else str(means.idxmax())


def conclusion(
    results: Results,
    baseline: str | Mapping[str, Any] | None = None,
    metric: str = "reward",
    budget: Budget = "steps",
) -> str:
    """Markdown: which settings end higher, lower, alike, or untold beside a baseline, and what stays open."""
    held_to = default_baseline(results) if baseline is None else find_setting(results, baseline)
    if held_to is None or results.done.trials.empty or results.history.empty:
        return "**Nothing can be concluded**: there is no finished run."
    if metric == "accuracy" and results.evals.empty:
        return "**Nothing can be concluded** about accuracy: no run has held-out evaluations."
    table = compare(results, held_to, metric, budget)
    if table.empty:
        return f"**Nothing to compare**: all finished runs have one setting ({held_to})."
    at = f"{table.attrs['at']:,.0f} {budget}"
    said = [f"{NAMES.get(metric, metric).capitalize()} at {at}, paired by seed, against **{held_to}**:", ""]
    for verdict, text in VERDICTS.items():
        rows = table[table["verdict"] == verdict]
        said += [f"- **{row.setting}**: {text}{_numbers(row)}" for row in rows.head(MOST).itertuples()]
        said += [f"- and {len(rows) - MOST} more: {text}"] if len(rows) > MOST else []
    return "\n".join([*said, "", _limits(table)])


def _numbers(row: Any) -> str:
    if math.isnan(row.difference):
        return ""
    if math.isnan(row.low):
        return f", {row.difference:+.3f} (n {row.n})"
    return f", {row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}] (p {row.p_holm:.2g}, n {row.n})"


def _limits(table: pd.DataFrame) -> str:
    """What the reader must not take from it."""
    n = int(table["n"].min())
    few = f" With {n} pairs only large differences can be shown." if 1 < n < FEW else ""
    return (
        "Intervals are 95 % and of one comparison each; p is corrected (Holm) for the "
        f"{int(table['p'].notna().sum())} comparisons made here; settings are told apart where it is below 0.05.{few} "
        "Not shown: anything about other models, tasks, lengths of run or hardware; nor that two settings are equal "
        "where they cannot be told apart."
    )
