"""A study's tables: a row per distinct setting, means over seeds with their intervals; for screens and papers.

results = load("runs/modes"); print(markdown(results))
summary_table(results)[["mode", "n", "reward", "reward_low", "reward_high"]]
write_tables({"summary": (summary_table(results), display_table(results))}, "report/tables")
"""

import math
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Group
from rich.table import Table

from overlaprl_ray.reports.budgets import to_target
from overlaprl_ray.reports.figures import FINALS
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.run_files import DECISIONS
from overlaprl_ray.reports.statistics import paired
from overlaprl_ray.reports.trials import CASE, effective, short_names, shown, varying, within_cases

WAY = 0.9  # of the way from the start to the best setting's final reward: the default target
COSTS = ("wall_s", "steps_per_s", "tokens")
TAKEN = {"n", "runs_not_done", "seconds_to_target", "reached", *FINALS, *COSTS, *DECISIONS}  # no setting's name


def default_target(results: Results) -> float | None:
    """The reward that is 90 % of the way from the mean start to the best setting's mean final one; None without any."""
    done = results.done.trials.set_index("trial")
    start = done["reward_first_10"].mean()
    best = done["reward_last_10"].groupby(results.settings).mean().max()
    return None if math.isnan(best) or best <= start else round(float(start + WAY * (best - start)), 3)


def summary_table(results: Results, target: float | None = None) -> pd.DataFrame:
    """A row per distinct setting: settings that vary ("-": no effect), then what its finished runs came to.

    `n` is the number of seeds; `runs_not_done` those that count nowhere else. `reward` (last ten steps) and `accuracy`
    (held out, final) are means over seeds with a 95 % t interval (`_low`, `_high`; NaN from one seed).
    `seconds_to_target` is the median over seeds, with those that never reached the reward `target` counted as last (NaN
    where the median is one of those); `reached` counts those that did. `fresh`, `stale`, `discard` are shares of steps.
    Runs of the same setting and seed are averaged before anything else: they are no further evidence.
    """
    trials = results.trials[results.trials["mode"].notna()].set_index("trial", drop=False)
    setting, done = results.settings, trials[trials["status"] == "done"]
    names = within_cases(trials, varying(trials))
    target = default_target(results) if target is None else target
    numbers = done[[*FINALS.values(), *COSTS]].astype("float64")
    for name in DECISIONS:
        numbers[name] = done[f"decisions.{name}"].astype("float64") / done["steps"].astype("float64")
    reached = math.nan if target is None else to_target(results, target)["seconds"].fillna(math.inf)
    seeds = numbers.assign(seconds=reached).groupby([setting[done.index].rename("setting"), done["seed"]]).mean()
    groups = seeds.groupby("setting")

    out = effective(trials).assign(**{CASE: trials.get(CASE)}).reindex(columns=names)[~setting.duplicated()]
    out = out.set_axis(short_names(names, TAKEN), axis=1).set_axis(setting.unique())
    out["n"] = groups.size().reindex(out.index, fill_value=0)
    out["runs_not_done"] = (trials["status"] != "done").groupby(setting).sum()
    for name, column in FINALS.items():
        means = paired(seeds[column].unstack("setting"))
        out[[name, f"{name}_low", f"{name}_high"]] = means[["mean", "low", "high"]].reindex(out.index)
    out["seconds_to_target"] = groups["seconds"].median().replace(math.inf, math.nan)
    out["reached"] = np.isfinite(seeds["seconds"]).groupby("setting").sum().reindex(out.index, fill_value=0)
    for name in (*COSTS, *DECISIONS):
        out[name] = groups[name].mean()
    out.attrs["target"] = target
    return out.reset_index(drop=True)


# ---- for people ----


def display_table(results: Results, target: float | None = None) -> pd.DataFrame:
    """`summary_table` as texts under the headings that people read."""
    table = summary_table(results, target)
    if table.empty:
        return pd.DataFrame()
    out = table.iloc[:, : table.columns.get_loc("n")].map(shown)
    out["seeds"] = table["n"].astype("str")
    if table["runs_not_done"].any():
        out["not done"] = table["runs_not_done"].astype("str")
    for name in FINALS:
        out[f"final {name}"] = with_interval(table[name], table[f"{name}_high"] - table[name])
    if table.attrs["target"] is not None:
        reached = table["reached"].astype("str") + "/" + table["n"].astype("str")
        out["s to target"] = numbers(table["seconds_to_target"], 1) + " (" + reached + ")"
    out["wall clock, s"] = numbers(table["wall_s"], 1)
    out["steps/s"] = numbers(table["steps_per_s"], 2)
    shares = [numbers(100 * table[name], 0) for name in DECISIONS]
    out["fresh/stale/discard, %"] = shares[0] + "/" + shares[1] + "/" + shares[2]
    return out


def runs_table(results: Results) -> pd.DataFrame:
    """Every run that was found, as texts."""
    trials = results.trials
    out = pd.DataFrame(
        {"run": trials["trial"], "setting": trials["trial"].map(results.settings).astype("object").fillna("-")}
    )
    out["status"] = trials["status"]
    columns = {"seed": ("seed", 0), "steps": ("steps", 0), "reward_last_10": ("final reward", 3),
               "accuracy_final": ("final accuracy", 3), "wall_s": ("wall clock, s", 1)}  # fmt: skip
    for column, (name, digits) in columns.items():
        out[name] = numbers(trials[column], digits)
    if trials["error"].notna().any():
        out["error"] = trials["error"].fillna("")
    return out


def comparison_texts(table: pd.DataFrame) -> pd.DataFrame:
    """The table of `compare`, `compare_budgets` or `compare_sweeps` as people read it."""
    if table.empty:
        return pd.DataFrame()
    out = pd.DataFrame({"setting": table["setting"], "n": table["n"].astype("str")})
    limits = " [" + table["low"].map("{:+.3f}".format) + ", " + table["high"].map("{:+.3f}".format) + "]"
    difference = table["difference"].map("{:+.3f}".format).where(table["n"] > 0, "-")
    out["difference [95 %]"] = difference + limits.where(table["low"].notna(), "")
    out["p"], out["p (Holm)"] = table["p"].map(p_text), table["p_holm"].map(p_text)
    out["verdict"] = table["verdict"]
    if "budget" in table:
        out.insert(0, "at equal", table["budget"] + " (" + numbers(table["at"], 0) + ")")
    return out


def ranking_texts(table: pd.DataFrame) -> pd.DataFrame:
    """`ranking`'s table as people read it."""
    out = table[["rank", "setting", "n"]].astype("str")
    out["mean"] = with_interval(table["mean"], table["high"] - table["mean"])
    out["identical to rank"] = table["identical_to"].replace("", "-")
    out["cannot be told apart from rank"] = table["cannot_be_told_apart_from"].replace("", "-")
    return out


def with_interval(means: pd.Series, halves: pd.Series) -> pd.Series:
    """0.612 ± 0.022; the mean alone where there is no interval."""
    return numbers(means, 3) + (" ± " + numbers(halves, 3)).where(halves.notna(), "")


def numbers(values: pd.Series, digits: int) -> pd.Series:
    """Numbers as texts, "-" where there is none."""
    return values.astype("float64").map(f"{{:,.{digits}f}}".format).astype("str").where(values.notna(), "-")


def p_text(p: float) -> str:
    """A p value with two digits, "-" where nothing was tested."""
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def notes(results: Results, target: float | None = None) -> list[str]:
    """What a reader of the table must know: what is counted, and what is not."""
    trials, done = results.trials, results.done.trials
    if trials.empty:
        return list(results.problems)
    target = default_target(results) if target is None else target
    states = ", ".join(f"{n} {status}" for status, n in trials["status"].value_counts().items())
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
    repeats = pd.DataFrame({"setting": done["trial"].map(results.settings), "seed": done["seed"]}).duplicated().sum()
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
    return [*said, *(failed["trial"] + ": " + failed["error"]), *results.problems]


def never_overlapped(results: Results) -> int:
    """Finished runs that generated ahead, but nothing while something else went on: their clock is not their mode's."""
    done = results.done.trials
    return int(((done["lag"] > 0) & (done["overlap_fraction"] == 0)).sum())


# ---- Markdown, files, terminal ----


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


def write_tables(tables: dict[str, tuple[pd.DataFrame, pd.DataFrame]], folder: str | Path) -> None:
    """Each table, given as (numbers, texts), as NAME.csv with the numbers, NAME.md and NAME.tex with the texts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (figures, texts) in tables.items():
        figures.to_csv(folder / f"{name}.csv", index=False)
        texts.to_latex(folder / f"{name}.tex", index=False, escape=True)
        (folder / f"{name}.md").write_text(markdown_table(texts) + "\n", encoding="utf-8")


def terminal_table(
    results: Results, title: str = "Results", target: float | None = None, width: int | None = None
) -> Group:
    """The table for a terminal of `width` columns, in blocks one under another where it is wider; None: no limit.

    With a width, results that are the same in every row are left out, but for the number of seeds.
    """
    texts = display_table(results, target)
    if width and len(texts) > 1:
        texts = texts.loc[:, (texts.nunique() > 1) | (texts.columns == "seeds")]
    left = list(texts.columns)[: list(texts.columns).index("seeds")] if len(texts) else []
    need = {name: max(map(len, [name, *texts[name]])) + 1 for name in texts}
    legend: list[str] = []
    if width and sum(need[name] for name in left) > width // 2:  # then settings go by number, with a legend
        rows = texts[left].to_dict("records")
        lines = [", ".join(v if name == CASE else f"{name} {v}" for name, v in row.items()) for row in rows]
        legend = [f"{number}: {line}" for number, line in enumerate(lines, start=1)]
        texts = texts.drop(columns=left)
        texts.insert(0, "no.", [str(number) for number in range(1, len(texts) + 1)])
        left, need["no."] = ["no."], 4
    blocks: list[list[str]] = [[]]
    for name in [name for name in texts if name not in left]:
        if width and blocks[-1] and sum(need[n] for n in [*left, *blocks[-1], name]) > width:
            blocks.append([])
        blocks[-1].append(name)
    tables = []
    for block in blocks:
        tables.append(Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold"))
        for column in [*left, *block]:
            tables[-1].add_column(column, justify="left" if column in left else "right", no_wrap=True)
        for row in texts[[*left, *block]].itertuples(index=False, name=None):
            tables[-1].add_row(*row)
    return Group(*legend, *tables)
