"""What the study's tables are made of: committed blocks, numbers, intervals and tests as Markdown."""

import math
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from overlaprl_ray.reports.loading import load
from overlaprl_ray.reports.statistics import paired
from overlaprl_ray.reports.study import contrasts, outcomes

HERE = Path(__file__).parent
RATE = "grpo.lr"


def block(name: str) -> pd.DataFrame:
    """A committed block's finished runs, a row each, with `area`."""
    return outcomes(load(HERE / "results" / name))


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [[*head], ["---"] * len([*head]), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, sign: bool = False) -> str:
    """Three decimals, the zero before the point left out; a dash for what was not run."""
    if math.isnan(value):
        return "–"
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def p_value(p: float) -> str:
    return "< .001" if p < 0.001 else number(p)


def mean_and_interval(values: pd.Series) -> str:
    """Mean ± half of the 95 % t interval over seeds."""
    found = paired(values.to_frame()).iloc[0]
    return f"{number(found['mean'])} ± {number(found['high'] - found['mean'])}"


def compared(wide: pd.DataFrame, pairs: list[tuple[str, str]], primary: tuple[str, str] | None = None) -> str:
    """Arms against others, paired by seed, with Holm's p and the test of equivalence."""
    found = contrasts(wide, pairs, primary=primary)
    rows = [
        (row["setting"], row["held_to"], row["n"],
         f"{number(row['difference'], True)} [{number(row['low'], True)}, {number(row['high'], True)}]",
         p_value(row["p_holm"]), p_value(row["p_equivalent"]), row["verdict"])
        for row in found.to_dict("records")
    ]  # fmt: skip
    head = ("arm", "held to", "seeds", "difference in area [95 %]", "p (Holm)", "p (equivalent)", "verdict")
    return markdown(head, rows)


def tested_cells(tests: pd.DataFrame, arm: str) -> list[str]:
    """An arm's row of `contrasts` as texts; dashes for what others are held to."""
    if arm not in tests.index:
        return ["–"] * 4
    test = tests.loc[arm]
    difference = f"{number(test['difference'], True)} [{number(test['low'], True)}, {number(test['high'], True)}]"
    return [difference, p_value(test["p_holm"]), p_value(test["p_equivalent"]), test["verdict"]]
