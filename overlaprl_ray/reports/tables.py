"""A study's tables: a row per distinct setting, means over seeds with their intervals; for screens and papers.

results = load("runs/modes"); print(markdown(results))
summary_table(results)[["mode", "n", "reward", "reward_low", "reward_high"]]
write_tables({"summary": (summary_table(results), display_table(results))}, "report/tables")
"""

import math

import numpy as np
import pandas as pd
from rich.console import Group
from rich.table import Table

from overlaprl_ray.reports.budgets import to_target
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.statistics import interval
from overlaprl_ray.reports.trials import CASE, effective, labels, shown, varying, within_cases

WAY = 0.9  # of the way from the start to the best setting's final reward: the default target
MEANS = {"reward": "reward_last_10", "accuracy": "accuracy_final"}  # with an interval
COSTS = ("wall_s", "steps_per_s", "tokens")
DECISIONS = ("fresh", "stale", "discard")


def default_target(results: Results) -> float | None:
    """The reward that is 90 % of the way from the mean start to the best setting's mean final one; None without any."""
    done = results.done
    if done.trials.empty:
        return None
    start = done.trials["reward_first_10"].mean()
    best = done.trials.groupby(labels(done.trials))["reward_last_10"].mean().max()
    return None if math.isnan(best) or best <= start else round(start + WAY * (best - start), 3)


def summary_table(results: Results, target: float | None = None) -> pd.DataFrame:
    """A row per distinct setting: settings that vary ("-": no effect), then what its finished runs came to.

    `n` is the number of seeds; `runs_not_done` those that count nowhere else. `reward` (last ten steps) and `accuracy`
    (held out, final) are means over seeds with a 95 % t interval (`_low`, `_high`; NaN from one seed).
    `seconds_to_target` is the median over seeds, with those that never reached the reward `target` counted as last (NaN
    where the median is one of those); `reached` counts those that did. `fresh`, `stale`, `discard` are shares of steps.
    Runs of the same setting and seed are averaged before anything else: they are no further evidence.
    """
    trials = results.trials[results.trials["mode"].notna()]
    names = within_cases(trials, varying(results.trials))
    target = default_target(results) if target is None else target
    seconds = None if target is None else to_target(results, target)["seconds"]
    settings, order = effective(trials), labels(trials, names)
    numbers = _by_seed(trials, order, seconds)
    rows = []
    for label, group in trials.groupby(order, sort=False):
        first = settings.loc[group.index[0]]
        head = {CASE: trials[CASE][group.index[0]]} if CASE in names else {}
        for name in [name for name in names if name != CASE]:
            head[name.rpartition(".")[2] if _unique(name, names) else name] = first[name]
        done = numbers.loc[[label]] if label in numbers.index else numbers.head(0)
        not_done = int((group["status"] != "done").sum())
        rows.append({**head, "n": len(done), "runs_not_done": not_done, **_aggregate(done)})
    table = pd.DataFrame(rows)
    table.attrs["target"] = target
    return table


def _by_seed(trials: pd.DataFrame, order: pd.Series, seconds: pd.Series | None) -> pd.DataFrame:
    """The finished runs' numbers by setting and seed, repeats averaged; a target never reached counts as infinity."""
    done = trials[trials["status"] == "done"]
    table = done[[*MEANS.values(), *COSTS]].astype("float64")
    for name in DECISIONS:
        table[name] = done[f"decisions.{name}"].astype("float64") / done["steps"].astype("float64")
    reached = math.nan if seconds is None else seconds.loc[done["trial"]].fillna(math.inf).to_numpy()
    table["seconds_to_target"] = reached
    return table.groupby([order.loc[done.index].rename("setting"), done["seed"]]).mean()


def _unique(name: str, names: list[str]) -> bool:
    leaf = name.rpartition(".")[2]
    taken = {"n", "runs_not_done", "seconds_to_target", "reached", *MEANS, *COSTS, *DECISIONS}
    return leaf not in taken and [other.rpartition(".")[2] for other in names].count(leaf) == 1


def _aggregate(done: pd.DataFrame) -> dict[str, float | int]:
    """A setting's numbers over its seeds."""
    out: dict[str, float | int] = {}
    for name, column in MEANS.items():
        found = interval(done[column].to_numpy())
        out |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    seconds = done["seconds_to_target"].to_numpy()
    middle = float(np.median(seconds)) if len(seconds) else math.nan
    out |= {"seconds_to_target": middle if math.isfinite(middle) else math.nan}
    out |= {"reached": int(np.isfinite(seconds).sum())}
    return out | done[[*COSTS, *DECISIONS]].mean(skipna=False).to_dict()


# ---- for people ----


def display_table(results: Results, target: float | None = None) -> pd.DataFrame:
    """`summary_table` as texts under the headings that people read."""
    table = summary_table(results, target)
    out = pd.DataFrame(index=table.index)
    for name in table.columns[: table.columns.get_loc("n")] if len(table) else []:
        out[name] = [shown(value) for value in table[name]]
    if table.empty:
        return out
    out["seeds"] = table["n"].astype("str")
    if table["runs_not_done"].any():
        out["not done"] = table["runs_not_done"].astype("str")
    for name in MEANS:
        parts = zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
        out[f"final {name}"] = [with_interval(*part) for part in parts]
    reached = zip(table["seconds_to_target"], table["reached"], table["n"], strict=True)
    if table.attrs["target"] is not None:
        out["s to target"] = [f"{number(s, 1)} ({k}/{n})" for s, k, n in reached]
    out["wall clock, s"] = [number(value, 1) for value in table["wall_s"]]
    out["steps/s"] = [number(value, 2) for value in table["steps_per_s"]]
    parts = zip(*(table[name] for name in DECISIONS), strict=True)
    out["fresh/stale/discard, %"] = ["/".join(number(100 * v, 0) for v in part) for part in parts]
    return out


def with_interval(mean: float, low: float, high: float, digits: int = 3) -> str:
    """0.612 ± 0.022, or [low, high] where they lie unevenly; the mean alone where there is no interval."""
    if math.isnan(low):
        return number(mean, digits)
    if abs((high - mean) - (mean - low)) < 1e-9:
        return f"{mean:.{digits}f} ± {high - mean:.{digits}f}"
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def number(value: float, digits: int) -> str:
    """A number, or "-" where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def notes(results: Results, target: float | None = None) -> list[str]:
    """What a reader of the table must know: what is counted, and what is not."""
    trials = results.trials
    counts = trials["status"].value_counts()
    if trials.empty:
        return list(results.problems)
    target = default_target(results) if target is None else target
    states = ", ".join(f"{n} {status}" for status, n in counts.items())
    said = [
        f"{len(trials)} run{'' if len(trials) == 1 else 's'}: {states}; only finished ones count.",
        "Final reward: mean of the last ten steps; final accuracy: greedy, held out; more is better. ± is the "
        "95 % t interval over seeds (none from one seed).",
    ]
    if target is not None:
        said.append(
            f"s to target: median seconds until the mean reward of ten steps reached {target:g} "
            "(in brackets: seeds that did, of all); less is better."
        )
    done = trials[trials["status"] == "done"]
    repeats = int(pd.DataFrame({"s": labels(done, varying(trials)), "seed": done["seed"]}).duplicated().sum())
    if repeats:
        said.append(f"{repeats} runs repeat a setting and seed; repeats are averaged, not counted.")
    for name, what in (("environment.cpu", "CPUs"), ("environment.commit", "commits")):
        if name in done and done[name].nunique() > 1:
            said.append(f"The runs come from {done[name].nunique()} different {what}: times may not compare.")
    if never := never_overlapped(results):
        said.append(
            f"{never} runs with batches ahead never overlapped, as those of the serial replay: their seconds and "
            "steps/s say nothing about their mode."
        )
    failed = trials[trials["error"].notna()]
    said += [f"{trial}: {error}" for trial, error in zip(failed["trial"], failed["error"], strict=True)]
    return said + results.problems


def never_overlapped(results: Results) -> int:
    """Finished runs that generated ahead, but nothing while something else went on: their clock is not their mode's."""
    done = results.done.trials
    return int(((done["lag"] > 0) & (done["overlap_fraction"] == 0)).sum())


def markdown(results: Results, title: str = "Results", target: float | None = None) -> str:
    """The table and its notes as a page of Markdown."""
    lines = [f"# {title}", "", markdown_table(display_table(results, target)), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(results, target)), ""])


def markdown_table(table: pd.DataFrame) -> str:
    """A table of texts as Markdown; empty where it has no rows."""
    if table.empty:
        return "No run to show."
    rows = [list(table.columns), ["---"] * len(table.columns), *table.astype("str").to_numpy().tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def terminal_table(
    results: Results, title: str = "Results", target: float | None = None, width: int | None = None
) -> Group:
    """The table for a terminal of `width` columns, in blocks side by side where it is wider; None: no limit."""
    texts = display_table(results, target)
    settings = list(texts.columns)[: list(texts.columns).index("seeds")] if len(texts) else []
    need = {name: max(map(len, [name, *texts[name]])) + 1 for name in texts}
    legend: list[str] = []
    if width and sum(need[name] for name in settings) > width // 2:  # then settings go by number, with a legend
        lines = [", ".join(f"{name} {row[name]}" for name in settings) for _, row in texts.iterrows()]
        legend = [f"{number}: {line}" for number, line in enumerate(lines, start=1)]
        texts = texts.drop(columns=settings)
        texts.insert(0, "no.", [str(number) for number in range(1, len(texts) + 1)])
        settings, need["no."] = ["no."], 4
    blocks: list[list[str]] = [[]]
    for name in [name for name in texts if name not in settings]:
        taken = sum(need[n] for n in [*settings, *blocks[-1], name])
        if width and taken > width and blocks[-1]:
            blocks.append([])
        blocks[-1].append(name)
    return Group(*legend, *(_rich(texts[[*settings, *block]], title, settings) for block in blocks))


def _rich(texts: pd.DataFrame, title: str, left: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in texts.columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in texts.itertuples(index=False, name=None):
        table.add_row(*row)
    return table
