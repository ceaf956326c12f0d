"""The tables of study.md, from the committed results: `python analysis/study_page.py` writes them into the page.

Every table stands between `<!-- name -->` and `<!-- end -->`; the rest of the page is prose. A test compares the two.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from study_cells import (
    HERE,
    RATE,
    block,
    compared,
    markdown,
    mean_and_interval,
    number,
    p_value,
    tested_cells,
)
from study_rules import rules_at, rules_tested, rules_tuning, thresholds

from overlaprl_ray.reports.loading import load
from overlaprl_ray.reports.statistics import paired
from overlaprl_ray.reports.study import contrasts
from overlaprl_ray.reports.study_figures import outcome_map

PAGE = HERE / "study.md"
UPDATES, CLIP, WARM_UP = "grpo.num_minibatches", "grpo.clip_eps", "grpo.lr_warmup_steps"


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


def e1_trials(clip: bool = True) -> pd.DataFrame:
    """Block E1's runs with or without the clip; `tuning` marks those that chose the rates."""
    trials = block("e1")
    trials = trials[trials[CLIP].notna() == clip]
    trials["arm"] = "lag " + trials["lag"].astype(int).astype(str)
    return trials.assign(tuning=trials["seed"] < 1000, updates=trials[UPDATES].astype(int))


def best_rates(tuning: pd.DataFrame) -> pd.Series:
    """The rate with the highest mean area of each (updates, lag)."""
    return tuning.groupby(["updates", "lag", RATE])["area"].mean().unstack(RATE).idxmax(axis=1)


def e1_surface() -> str:
    """Mean area on the tuning seeds by updates, lag and rate; the best of a row is bold."""
    tuning = e1_trials().query("tuning")
    table = tuning.groupby(["updates", "lag", RATE])["area"].mean().unstack(RATE)
    rows = []
    for (updates, lag), areas in table.iterrows():
        cells = [f"**{number(a)}**" if a == areas.max() else number(a) for a in areas]
        rows.append((updates, int(lag), *cells))
    return markdown(("updates", "lag", *(f"{rate:g}" for rate in table)), rows)


def e1_tested(updates: int, outcome: str = "area") -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Outcomes on the test seeds (seed × arm) at each lag's own rate and at lag 0's, and the own rates by lag."""
    trials = e1_trials()
    rates = best_rates(trials[trials["tuning"]]).loc[updates]
    tested = trials[~trials["tuning"] & (trials["updates"] == updates)]
    own = tested[tested[RATE] == tested["lag"].map(rates)]
    fixed = tested[tested[RATE] == rates[0]]
    wide = [part.pivot_table(index="seed", columns="arm", values=outcome) for part in (own, fixed)]
    return wide[0], wide[1], rates


def e1_table(updates: int) -> str:
    """Each lag on the test seeds, at its own rate and at lag 0's, and what it loses against lag 0."""
    own, fixed, rates = e1_tested(updates)
    final, _, _ = e1_tested(updates, "accuracy_final")
    pairs = [(arm, "lag 0") for arm in own if arm != "lag 0"]
    tests = contrasts(own, pairs).set_index("setting")
    rows = []
    for lag, rate in rates.items():
        arm = f"lag {int(lag)}"
        at_fixed = mean_and_interval(fixed[arm]) if arm in fixed else "–"
        row = [
            int(lag),
            f"{rate:g}",
            own[arm].count(),
            mean_and_interval(own[arm]),
            mean_and_interval(final[arm]),
            at_fixed,
        ]
        row += tested_cells(tests, arm)
        rows.append(row)
    at_lag_0s = f"area at {rates[0]:g}"
    head = ("lag", "own rate", "seeds", "area at it", "final accuracy", at_lag_0s, "area less lag 0 [95 %]", "p (Holm)",
            "p (equivalent)", "verdict")  # fmt: skip
    return markdown(head, rows)


def e1_clip() -> str:
    """Lag 1 without the clip, at the rate that is best for it, against lag 0, whose clip never acts."""
    trials = e1_trials(clip=False)
    rate = trials[trials["tuning"]].groupby(RATE)["area"].mean().idxmax()
    off = trials[~trials["tuning"] & (trials[RATE] == rate)].set_index("seed")["area"]
    own, _, rates = e1_tested(1)
    arm = f"lag 1, clip off, rate {rate:g}"
    wide = (
        own[["lag 0", "lag 1"]]
        .rename(columns=lambda name: f"{name}, rate {rates[int(name[-1])]:g}")
        .assign(**{arm: off})
    )
    return compared(wide, [(arm, wide.columns[0]), (arm, wide.columns[1])])


def slopes() -> str:
    """P2: per tuning seed, the slope of log best rate over log (1 + lag), negated."""
    rows = []
    for updates, part in e1_trials().query("tuning").groupby("updates"):
        best = part.pivot_table(index=["seed", "lag"], columns=RATE, values="area").idxmax(axis=1).unstack("lag")
        x = np.log1p(best.columns.to_numpy(np.float64))
        alpha = [-np.polyfit(x, np.log(rates), 1)[0] for rates in best.to_numpy(np.float64)]
        found = paired(pd.DataFrame(alpha)).iloc[0]
        rows.append((updates, len(alpha), number(found["mean"]), f"[{number(found['low'])}, {number(found['high'])}]"))
    return markdown(("updates", "seeds", "α", "95 %"), rows)


def e1_repair() -> str:
    """P3: what lag 8 loses at its own rate, less half of what it loses at lag 0's; below 0 as predicted."""
    rows = []
    for updates in (1, 4):
        own, fixed, _ = e1_tested(updates)
        losses = pd.DataFrame({"own": own["lag 0"] - own["lag 8"], "fixed": own["lag 0"] - fixed["lag 8"]})
        found = paired((losses["own"] - 0.5 * losses["fixed"]).to_frame()).iloc[0]
        rows.append((updates, mean_and_interval(losses["fixed"]), mean_and_interval(losses["own"]),
                     f"{number(found['mean'], True)} [{number(found['low'], True)}, {number(found['high'], True)}]",
                     p_value(found["p"])))  # fmt: skip
    return markdown(("updates", "lag 8 loses at lag 0's rate", "at its own", "own − half [95 %]", "p"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "e0": e0, "e0-tests": e0_tests,
    "e1-surface": e1_surface, "e1-1": lambda: e1_table(1), "e1-4": lambda: e1_table(4), "slopes": slopes,
    "e1-repair": e1_repair,
    "e1-clip": e1_clip,
    "e2b-tuning": lambda: rules_tuning("e2b"),
    "e2b": lambda: rules_tested("e2b", primary="kl on the update"),
    "e2b-lag0": lambda: rules_at("e2b", 4e-4),
    "e2b-high": lambda: rules_at("e2b", 8e-4),
    "e3": thresholds,
}  # fmt: skip


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        before, found, after = page.partition(f"<!-- {name} -->\n")
        if not found:
            raise ValueError(f"study.md: no place for table {name}; add <!-- {name} --> and <!-- end --> to it")
        page = f"{before}{found}{table()}\n{after[after.index('<!-- end -->') :]}"
    return page


def draw() -> None:
    """Block E1's map of areas over lag and rate, on the tuning seeds."""
    results = load(HERE / "results" / "e1")
    outcome_map(results.of(results.trials["seed"] < 1000), RATE, "pipeline.lag").savefig(
        HERE / "figures" / "study_e1.png"
    )


if __name__ == "__main__":
    draw()
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
