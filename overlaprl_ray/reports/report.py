"""Everything about some runs or sweeps in one page and its tables: report.html, tables/, figures/.

The page needs nothing but itself: pandas' tables and matplotlib's figures (as data) in a Jinja template, no script.

    write_report(load("runs/modes"), "runs/modes/report")
    write_comparison(load("runs/a"), load("runs/b"), "runs/a-b")
"""

import base64
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from overlaprl_ray.reports.comparison import (
    compare_budgets,
    compare_sweeps,
    default_baseline,
    find_setting,
    ranking,
    throughout,
)
from overlaprl_ray.reports.figures import NOTE, learning_curves, note, pairs, throughput
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.staleness_figures import (
    decisions_over_time,
    kl_against_lag,
    threshold_map,
    who_gets_discarded,
)
from overlaprl_ray.reports.tables import (
    comparison_texts,
    display_table,
    never_overlapped,
    notes,
    ranking_texts,
    runs_table,
    summary_table,
    write_tables,
)
from overlaprl_ray.reports.timelines import gantt

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
# A block of the page: a heading with text, bullets, a table or pictures under it.
Block = dict[str, Any]

TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True).from_string("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,"><title>{{ title }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; padding: 0 16px 48px; max-width: 1180px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e3e3e3; }
figure { margin: 0 0 16px; } figure img { width: 100%; height: auto; max-width: 860px; }
p, li, figcaption { max-width: 46rem; } figcaption, .muted { color: #555; font-size: .88rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px 32px; }
</style></head><body><h1>{{ title }}</h1>
{% for block in blocks %}
{% if block.heading %}<h2>{{ block.heading }}</h2>{% endif %}
{% if block.text %}<p>{{ block.text }}</p>{% endif %}
{% if block.bullets %}<ul>{% for text in block.bullets %}<li>{{ text }}</li>{% endfor %}</ul>{% endif %}
{% if block.table is defined %}<div class="wide" tabindex="0">
{{ block.table.to_html(index=False, border=0) | safe }}</div>
<p class="muted">{{ block.caption }}</p>{% endif %}
{% if block.pictures %}<div class="pictures">{% for caption, data, said in block.pictures %}
<figure>{% if data %}<img alt="{{ caption }}" src="data:image/png;base64,{{ data }}">{% endif %}
<figcaption>{{ caption }}{% if said %}: {{ said }}{% endif %}</figcaption></figure>
{% endfor %}</div>{% endif %}
{% endfor %}
{% if command %}<p class="muted">Made by: {{ command }}</p>{% endif %}
</body></html>
""")


def write_report(
    results: Results,
    folder: str | Path,
    *,
    baseline: str | Mapping[str, Any] | None = None,
    target: float | None = None,
    command: str = "",
) -> Path:
    """Write the page, its tables and its figures; returns the page. Raises `ConfigError` for an unknown baseline."""
    base = default_baseline(results) if baseline is None else find_setting(results, baseline)
    found: Tables = {"summary": (summary_table(results, target), display_table(results, target))}
    blocks = [_table(found, "summary", "", "One row per setting.") | {"bullets": notes(results, target)}]
    blocks.append({"heading": "Figures", "pictures": _figures(results, Path(folder) / "figures")})
    for metric in ("reward", "accuracy"):
        rows = compare_budgets(results, base, metric, clock=not never_overlapped(results))
        if len(rows):
            ranks = ranking(results, metric)
            found[f"compare-{metric}"] = (rows, comparison_texts(rows))
            found[f"ranking-{metric}"] = (ranks, ranking_texts(ranks))
            said = f"Differences from {base}, paired by seed; Holm's correction within each budget."
            blocks.append(_table(found, f"compare-{metric}", f"Compared: {metric}", said))
            said = "By mean at equal steps; told apart only at 5 % after Holm's correction over all pairs."
            blocks.append(_table(found, f"ranking-{metric}", f"Ranking: {metric}", said))
    if "compare-reward" not in found:
        blocks.insert(1, {"text": "Fewer than two settings with finished runs: nothing to compare."})
    found["runs"] = (results.trials.drop(columns="folder", errors="ignore"), runs_table(results))
    blocks.append(_table(found, "runs", "Runs", "Every run that was found."))
    return _write(Path(folder), "Results", blocks, found, command)


def write_comparison(first: Results, second: Results, folder: str | Path, *, command: str = "") -> Path:
    """Write a page on two sweeps: what differs throughout, and each shared setting's difference; returns the page."""
    sweeps = (first, second)
    names = [str(results.trials["source"].iloc[0]) for results in sweeps]
    names = names if names[0] != names[1] else [f"{names[0]} (first)", f"{names[1]} (second)"]
    said = [f"{name}: {a} in {names[0]}, {b} in {names[1]}" for name, (a, b) in throughout(first, second).items()]
    same = ["No setting differs throughout: the sweeps differ in seeds, code or machine only."]
    about = f"Every difference is {names[1]} minus {names[0]}, paired by seed, at equal steps."
    blocks: list[Block] = [{"text": about, "bullets": said or same}]
    found: Tables = {}
    for metric, kind in (("reward", "history"), ("accuracy", "evals")):
        if any(getattr(results.done, kind).empty for results in sweeps):
            continue
        rows = compare_sweeps(first, second, metric)
        found[f"compare-{metric}"] = (rows, comparison_texts(rows))
        caption = f"Shared settings at {rows.attrs['at']:,.0f} steps; Holm's correction over all of them."
        block = _table(found, f"compare-{metric}", f"Final {metric}", caption, "The sweeps share no setting.")
        file = Path(folder) / "figures" / f"{metric}.png"
        blocks.append(block | {"pictures": [_picture(pairs(rows, *names), f"Difference in {metric}", file)]})
    if not found:
        blocks.append({"text": "At least one of the two has no finished run: nothing to compare."})
    for key, name, results in zip(("first", "second"), names, sweeps, strict=True):
        found[f"summary-{key}"] = (summary_table(results), display_table(results))
        block = _table(found, f"summary-{key}", name, "One row per setting.")
        blocks.append(block | {"bullets": notes(results)})
    return _write(Path(folder), f"{names[1]} against {names[0]}", blocks, found, command)


def _table(found: Tables, name: str, heading: str, caption: str, empty: str = "No run to show.") -> Block:
    texts = found[name][1]
    if texts.empty:
        return {"heading": heading, "text": empty}
    if len(texts) > MOST_ROWS:
        caption += f" The first {MOST_ROWS} of {len(texts)} rows; all are in tables/{name}.csv."
    return {"heading": heading, "table": texts.head(MOST_ROWS), "caption": caption}


def _figures(results: Results, folder: Path) -> list[tuple[str, str, str]]:
    """The figures as (caption, PNG in base64, why there is none); each is also a file."""
    left_out = CLOCKED if never_overlapped(results) else ()
    clock = "left out, since the runs' clocks are not those of their modes."
    found = [
        _picture(note(clock) if name in left_out else draw(results), caption, folder / f"{name}.png")
        for name, (caption, draw) in FIGURES.items()
    ]
    return sorted(found, key=lambda picture: not picture[1])  # those that only say why they are none come last


def _picture(figure: Figure, caption: str, file: Path) -> tuple[str, str, str]:
    if figure.get_label() == NOTE:
        return caption, "", figure.texts[0].get_text()
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # dozens of settings in one legend leave the axes little room: the picture is crowded, not wrong
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(file)
    return caption, base64.b64encode(file.read_bytes()).decode(), ""


def _write(folder: Path, title: str, blocks: list[Block], tables: Tables, command: str) -> Path:
    write_tables(tables, folder / "tables")
    path = folder / "report.html"
    path.write_text(TEMPLATE.render(title=title, blocks=blocks, command=command), encoding="utf-8")
    return path
