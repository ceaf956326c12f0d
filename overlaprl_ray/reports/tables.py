"""A study's tables as people take them away: texts for reading, CSV, Markdown and LaTeX for papers.

write_tables({"summary": (summary_table(results), display_table(results))}, "report/tables")
"""

import math
from pathlib import Path

import pandas as pd

from overlaprl_ray.reports.results import markdown_table, number

_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
          "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}  # fmt: skip


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


def latex_table(table: pd.DataFrame) -> str:
    """A table of texts as LaTeX (package booktabs)."""

    def line(cells: list[str]) -> str:
        return " & ".join("".join(_LATEX.get(c, c) for c in str(cell)) for cell in cells) + r" \\"

    rows = [line(row) for row in table.astype("str").to_numpy().tolist()]
    head = [rf"\begin{{tabular}}{{{'l' * len(table.columns)}}}", r"\toprule", line(list(table.columns)), r"\midrule"]
    return "\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}", ""])


def write_tables(tables: dict[str, tuple[pd.DataFrame, pd.DataFrame]], folder: str | Path) -> list[Path]:
    """Each table, given as (numbers, texts), as NAME.csv with the numbers, NAME.md and NAME.tex with the texts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (numbers, texts) in tables.items():
        contents = {".md": markdown_table(texts) + "\n", ".tex": latex_table(texts)}
        for suffix, text in contents.items():
            written.append(folder / f"{name}{suffix}")
            written[-1].write_text(text, encoding="utf-8")
        written.append(folder / f"{name}.csv")
        numbers.to_csv(written[-1], index=False)
    return written
