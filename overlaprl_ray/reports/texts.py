"""Comparisons, rankings and runs as texts for reading, and tables as files: CSV, Markdown, LaTeX.

write_tables({"summary": (summary_table(results), display_table(results))}, "report/tables")
"""

import math
from pathlib import Path

import pandas as pd

from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.tables import markdown_table, number
from overlaprl_ray.reports.trials import labels, varying


def runs_table(results: Results) -> pd.DataFrame:
    """Every run that was found, as texts."""
    trials = results.trials
    texts = pd.DataFrame(
        {"run": trials["trial"], "setting": labels(trials, varying(trials)), "status": trials["status"]}
    )
    columns = {"seed": ("seed", 0), "steps": ("steps", 0), "reward_last_10": ("final reward", 3),
               "accuracy_final": ("final accuracy", 3), "wall_s": ("wall clock, s", 1)}  # fmt: skip
    for column, (name, digits) in columns.items():
        texts[name] = [number(value, digits) for value in trials[column]]
    if trials["error"].notna().any():
        texts["error"] = trials["error"].fillna("")
    return texts


def comparison_texts(table: pd.DataFrame) -> pd.DataFrame:
    """The table of `compare`, `compare_budgets` or `compare_sweeps` as people read it."""
    if table.empty:
        return pd.DataFrame()
    out = pd.DataFrame({"setting": table["setting"], "n": table["n"].astype("str")})
    out["difference [95 %]"] = [
        "-" if math.isnan(d) else f"{d:+.3f}" + ("" if math.isnan(low) else f" [{low:+.3f}, {high:+.3f}]")
        for d, low, high in zip(table["difference"], table["low"], table["high"], strict=True)
    ]
    out["p"] = [p_text(p) for p in table["p"]]
    out["p (Holm)"] = [p_text(p) for p in table["p_holm"]]
    out["verdict"] = table["verdict"].astype("str")
    if "budget" in table:
        budgets = zip(table["budget"], table["at"], strict=True)
        out.insert(0, "at equal", [f"{budget} ({at:,.0f})" for budget, at in budgets])
    return out


def ranking_texts(table: pd.DataFrame) -> pd.DataFrame:
    """`ranking`'s table as people read it."""
    out = pd.DataFrame(
        {"rank": table["rank"].astype("str"), "setting": table["setting"], "n": table["n"].astype("str")}
    )
    parts = zip(table["mean"], table["low"], table["high"], strict=True)
    out["mean"] = [number(m, 3) + ("" if math.isnan(low) else f" ± {high - m:.3f}") for m, low, high in parts]
    out["identical to rank"] = table["identical_to"].replace("", "-")
    out["cannot be told apart from rank"] = table["cannot_be_told_apart_from"].replace("", "-")
    return out


def p_text(p: float) -> str:
    """A p value with two digits, "-" where nothing was tested."""
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


def write_tables(tables: dict[str, tuple[pd.DataFrame, pd.DataFrame]], folder: str | Path) -> list[Path]:
    """Each table, given as (numbers, texts), as NAME.csv with the numbers, NAME.md and NAME.tex with the texts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (numbers, texts) in tables.items():
        contents = {".md": markdown_table(texts) + "\n", ".tex": texts.to_latex(index=False, escape=True)}
        for suffix, text in contents.items():
            written.append(folder / f"{name}{suffix}")
            written[-1].write_text(text, encoding="utf-8")
        written.append(folder / f"{name}.csv")
        numbers.to_csv(written[-1], index=False)
    return written
