"""Everything about some runs or sweeps in one page and its tables: report.html, tables/, figures/.

write_report(load("runs/modes"), "runs/modes/report")
write_comparison(load("runs/a"), load("runs/b"), "runs/a-b")
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from overlaprl_ray.reports import html
from overlaprl_ray.reports.comparison import (
    compare_budgets,
    compare_sweeps,
    default_baseline,
    find_setting,
    ranking,
    throughout,
)
from overlaprl_ray.reports.conclusions import conclusion
from overlaprl_ray.reports.figures import NOTE, gantt, learning_curves, note, pairs, throughput
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.results import display_table, never_overlapped, notes, number, summary_table
from overlaprl_ray.reports.staleness_figures import (
    decisions_over_time,
    kl_against_lag,
    threshold_map,
    who_gets_discarded,
)
from overlaprl_ray.reports.tables import comparison_texts, ranking_texts, write_tables
from overlaprl_ray.reports.trials import labels, varying

MOST_ROWS = 60  # rows of a table on the page: the CSV file has all
Draw = Callable[[Results], Figure]
FIGURES: dict[str, tuple[str, Draw]] = {
    "reward-steps": ("Reward by step", lambda r: learning_curves(r, "reward", "steps")),
    "reward-seconds": ("Reward by wall clock", lambda r: learning_curves(r, "reward", "seconds")),
    "accuracy-steps": ("Held-out accuracy by step", lambda r: learning_curves(r, "accuracy", "steps")),
    "accuracy-seconds": ("Held-out accuracy by wall clock", lambda r: learning_curves(r, "accuracy", "seconds")),
    "throughput": ("Reward against throughput", throughput),
    "kl-lag": ("KL against lag", kl_against_lag),
    "decisions": ("Decisions over time", decisions_over_time),
    "discarded": ("Who gets discarded", who_gets_discarded),
    "thresholds": ("Thresholds: reward and share of steps discarded", threshold_map),
    "gantt": ("Who worked when", gantt),
}
CLOCKED = ("reward-seconds", "accuracy-seconds", "throughput")  # figures of seconds
Tables = dict[str, tuple[pd.DataFrame, pd.DataFrame]]  # name -> (numbers, texts)


def write_report(
    results: Results,
    folder: str | Path,
    *,
    title: str = "Results",
    baseline: str | Mapping[str, Any] | None = None,
    target: float | None = None,
    command: str = "",
) -> Path:
    """Write the page, its tables and its figures; returns the page. Raises `ConfigError` for an unknown baseline."""
    base = default_baseline(results) if baseline is None else find_setting(results, baseline)
    folder = Path(folder)
    found: Tables = {"summary": (summary_table(results, target), display_table(results, target))}
    blocks = [html.table(found["summary"][1], "One row per setting."), html.bullets(notes(results, target))]
    for metric in ("reward", "accuracy"):
        rows = compare_budgets(results, base, metric, clock=not never_overlapped(results))
        if len(rows):
            found[f"compare-{metric}"] = (rows, comparison_texts(rows))
            ranks = ranking(results, metric)
            found[f"ranking-{metric}"] = (ranks, ranking_texts(ranks))
    blocks += [html.heading("What is shown, and what is not")]
    blocks += [html.prose(conclusion(results, base, m)) for m in ("reward", "accuracy") if f"compare-{m}" in found]
    if "compare-reward" not in found:
        blocks += [html.paragraph("Fewer than two settings with finished runs: nothing to compare.")]
    blocks += _figures(results, folder / "figures")
    captions = {
        "compare": f"Differences from {base}, paired by seed; Holm's correction within each budget.",
        "ranking": "By mean at equal steps; told apart only at 5 % after Holm's correction over all pairs.",
    }
    for name in [name for name in found if name != "summary"]:
        kind, _, metric = name.partition("-")
        head = {"compare": f"Compared: {metric}", "ranking": f"Ranking: {metric}"}[kind]
        blocks += [html.heading(head), _table(found[name][1], captions[kind], f"{name}.csv")]
    found["runs"] = _runs(results)
    blocks += [html.heading("Runs"), _table(found["runs"][1], "Every run that was found.", "runs.csv")]
    blocks += [html.paragraph(f"Made by: {command}", "muted")] if command else []
    return _write(folder, title, blocks, found)


def _write(folder: Path, title: str, blocks: list[str], tables: Tables) -> Path:
    write_tables(tables, folder / "tables")
    path = folder / "report.html"
    path.write_text(html.page(title, blocks), encoding="utf-8")
    return path


def _table(texts: pd.DataFrame, caption: str, file: str) -> str:
    more = f" The first {MOST_ROWS} of {len(texts)} rows; all are in tables/{file}." if len(texts) > MOST_ROWS else ""
    return html.table(texts.head(MOST_ROWS), caption + more)


def _figures(results: Results, folder: Path) -> list[str]:
    """The figures as blocks, those that only say why they are none at the end; each is also a file."""
    clock = "left out, since the runs' clocks are not those of their modes."
    left_out = CLOCKED if never_overlapped(results) else ()
    blocks: dict[str, list[str]] = {"narrow": [], "said": [], "broad": []}
    for name, (caption, draw) in FIGURES.items():
        figure = note(clock) if name in left_out else draw(results)
        kind = "said" if figure.get_label() == NOTE else "broad" if figure.get_figwidth() > 9 else "narrow"
        blocks[kind].append(html.picture(figure, caption, folder / f"{name}.png"))
    pictures = f'<div class="pictures">{"".join(blocks["narrow"])}</div>'
    return [html.heading("Figures"), pictures, *blocks["broad"], *blocks["said"]]


def _runs(results: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    trials = results.trials
    texts = pd.DataFrame(
        {"run": trials["trial"], "setting": labels(trials, varying(trials)), "status": trials["status"]}
    )
    texts["seed"] = [number(value, 0) for value in trials["seed"]]
    for column, name, digits in (
        ("steps", "steps", 0), ("reward_last_10", "final reward", 3), ("accuracy_final", "final accuracy", 3),
        ("wall_s", "wall clock, s", 1),
    ):  # fmt: skip
        texts[name] = [number(value, digits) for value in trials[column]]
    if trials["error"].notna().any():
        texts["error"] = trials["error"].fillna("")
    return trials.drop(columns="folder", errors="ignore"), texts


# ---- two sweeps ----


def write_comparison(first: Results, second: Results, folder: str | Path, *, command: str = "") -> Path:
    """Write a page on two sweeps: what differs throughout, and each shared setting's difference; returns the page."""
    names = [str(results.trials["source"].iloc[0]) for results in (first, second)]
    names = names if names[0] != names[1] else [f"{names[0]} (first)", f"{names[1]} (second)"]
    differ = throughout(first, second)
    said = [f"{name}: {a} in {names[0]}, {b} in {names[1]}" for name, (a, b) in differ.items()]
    blocks = [html.paragraph(f"Every difference is {names[1]} minus {names[0]}, paired by seed, at equal steps.")]
    blocks += [
        html.bullets(said or ["No setting differs throughout: the sweeps differ in seeds, code or machine only."])
    ]
    found: Tables = {}
    for metric in ("reward", "accuracy"):
        if any((r.evals if metric == "accuracy" else r.history).empty or r.done.trials.empty for r in (first, second)):
            continue
        rows = compare_sweeps(first, second, metric)
        found[f"compare-{metric}"] = (rows, comparison_texts(rows))
        blocks += [html.heading(f"Final {metric}")]
        if rows.empty:
            blocks += [html.paragraph("The sweeps share no setting.")]
            continue
        caption = f"Shared settings at {rows.attrs['at']:,.0f} steps; Holm's correction over all of them."
        blocks += [_table(found[f"compare-{metric}"][1], caption, f"compare-{metric}.csv")]
        blocks += [html.picture(pairs(rows, *names), f"Difference in {metric} by setting")]
    if not found:
        blocks += [html.paragraph("At least one of the two has no finished run: nothing to compare.")]
    for key, name, results in zip(("first", "second"), names, (first, second), strict=True):
        found[f"summary-{key}"] = (summary_table(results), display_table(results))
        blocks += [html.heading(name), html.table(found[f"summary-{key}"][1], "One row per setting.")]
        blocks += [html.bullets(notes(results))]
    blocks += [html.paragraph(f"Made by: {command}", "muted")] if command else []
    return _write(Path(folder), f"{names[1]} against {names[0]}", blocks, found)
