"""The tables of study.md, from the committed results: `python analysis/study_page.py` writes them into the page.

Every table stands between `<!-- name -->` and `<!-- end -->`; the rest of the page is prose. A test compares the two.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from overlaprl_ray.reports.loading import load
from overlaprl_ray.reports.statistics import paired
from overlaprl_ray.reports.study import contrasts, outcomes

HERE = Path(__file__).parent
PAGE = HERE / "study.md"
RATE, UPDATES, CLIP, WARM_UP = "grpo.lr", "grpo.num_minibatches", "grpo.clip_eps", "grpo.lr_warmup_steps"


def block(name: str) -> pd.DataFrame:
    """A committed block's finished runs, a row each, with `area`."""
    return outcomes(load(HERE / "results" / name))


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [[*head], ["---"] * len([*head]), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, sign: bool = False) -> str:
    """Three decimals, the zero before the point left out."""
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


def e0_arms() -> pd.DataFrame:
    trials = block("e0")
    clip = trials[CLIP].map(lambda value: "off" if pd.isna(value) else f"{value:g}")
    return trials.assign(
        arm="lag " + trials["lag"].astype(int).astype(str) + ", clip " + clip,
        warm_up=trials[WARM_UP].astype(int),
    )


def e0() -> str:
    """Areas and final accuracies by lag, clip and warm-up."""
    rows = [
        (warm_up, arm, len(part), mean_and_interval(part["area"]), mean_and_interval(part["accuracy_final"]))
        for (warm_up, arm), part in e0_arms().groupby(["warm_up", "arm"])
    ]
    return markdown(("warm-up, steps", "arm", "seeds", "area", "final accuracy"), rows)


def e0_tests() -> str:
    trials = e0_arms()
    wide = trials[trials["warm_up"] == 20].pivot_table(index="seed", columns="arm", values="area")
    pairs = [("lag 1, clip off", "lag 0, clip off"), ("lag 1, clip 0.2", "lag 0, clip 0.2"),
             ("lag 1, clip 0.2", "lag 1, clip off")]  # fmt: skip
    return compared(wide, pairs)


TABLES: dict[str, Callable[[], str]] = {"e0": e0, "e0-tests": e0_tests}


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        before, found, after = page.partition(f"<!-- {name} -->\n")
        if not found:
            raise ValueError(f"study.md: no place for table {name}; add <!-- {name} --> and <!-- end --> to it")
        page = f"{before}{found}{table()}\n{after[after.index('<!-- end -->') :]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
