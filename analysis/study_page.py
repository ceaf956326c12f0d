"""The tables of study.md, from the committed results: `python analysis/study_page.py` writes them into the page.

Every table stands between `<!-- name -->` and `<!-- end -->`; the rest of the page is prose. A test compares the two.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from overlaprl_ray.reports.loading import load
from overlaprl_ray.reports.statistics import paired
from overlaprl_ray.reports.study import contrasts, outcomes
from overlaprl_ray.reports.study_figures import outcome_map

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


def e1_trials() -> pd.DataFrame:
    """Block E1's runs from the packaged weights; `tuning` marks those that chose the rates."""
    trials = block("e1")
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


def e1_tested(updates: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Areas on the test seeds (seed × arm) at each lag's own rate and at lag 0's, and the own rates by lag."""
    trials = e1_trials()
    rates = best_rates(trials[trials["tuning"]]).loc[updates]
    tested = trials[~trials["tuning"] & (trials["updates"] == updates)]
    own = tested[tested[RATE] == tested["lag"].map(rates)]
    fixed = tested[tested[RATE] == rates[0]]
    wide = [part.pivot_table(index="seed", columns="arm", values="area") for part in (own, fixed)]
    return wide[0], wide[1], rates


def e1_table(updates: int) -> str:
    """Each lag on the test seeds, at its own rate and at lag 0's, and what it loses against lag 0."""
    own, fixed, rates = e1_tested(updates)
    pairs = [(arm, "lag 0") for arm in own if arm != "lag 0"]
    tests = contrasts(own, pairs).set_index("setting")
    rows = []
    for lag, rate in rates.items():
        arm = f"lag {int(lag)}"
        at_fixed = mean_and_interval(fixed[arm]) if arm in fixed else "–"
        row = [int(lag), f"{rate:g}", own[arm].count(), mean_and_interval(own[arm]), at_fixed]
        if arm in tests.index:
            test = tests.loc[arm]
            row += [f"{number(test['difference'], True)} [{number(test['low'], True)}, {number(test['high'], True)}]",
                    p_value(test["p_holm"]), p_value(test["p_equivalent"]), test["verdict"]]  # fmt: skip
        else:
            row += ["–"] * 4
        rows.append(row)
    head = ("lag", "own rate", "seeds", "area at it", f"at {rates[0]:g}", "own rate, less lag 0 [95 %]", "p (Holm)",
            "p (equivalent)", "verdict")  # fmt: skip
    return markdown(head, rows)


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


# ---- rules ----

KEYS = [RATE, "staleness.kl_fresh", "staleness.kl_stale"]  # what is chosen for an arm
APPLIED = {"update": "update", "lr": "rate", "loss": "loss"}


def rule_of(trial: pd.Series) -> str:
    """An arm's name: its rule, what the rule acts on, and what else tells arms apart."""
    rule = trial["rule"]
    if rule == "none":
        return "none" if trial["grpo.correction"] == "none" else str(trial["grpo.correction"])
    if rule in ("kl", "ess"):
        per = "" if trial["staleness.granularity"] == "batch" else f" by {trial['staleness.granularity']}"
        return f"{rule} on the {APPLIED[trial['staleness.apply_to']]}{per}"
    more = {"opsm": "staleness.opsm_delta", "random": "staleness.discard_probability"}
    return f"{rule} {trial[more[rule]]:g}" if rule in more else str(rule)


def rule_trials(name: str) -> pd.DataFrame:
    trials = block(name)
    return trials.assign(arm=trials.apply(rule_of, axis=1), tuning=trials["seed"] < 1000)


def chosen(trials: pd.DataFrame) -> pd.Series:
    """Each arm's rate and thresholds with the highest mean area on the tuning seeds, as tuples."""
    areas = trials[trials["tuning"]].groupby(["arm", *KEYS])["area"].mean()
    return areas.groupby("arm").idxmax().map(lambda key: key[1:])


def rules_tuning(name: str) -> str:
    """Mean area on the tuning seeds at the default thresholds by arm and rate; the best of a row is bold."""
    trials = rule_trials(name)
    first = trials[trials["tuning"]].drop_duplicates("arm").set_index("arm")[KEYS[1:]]
    plain = trials[trials["tuning"] & (trials[KEYS[1]] == trials[KEYS[1]].mode()[0])]
    table = plain.groupby(["arm", RATE])["area"].mean().unstack(RATE).reindex(first.index)
    rows = [(arm, *(f"**{number(a)}**" if a == row.max() else number(a) for a in row)) for arm, row in table.iterrows()]
    return markdown(("arm", *(f"{rate:g}" for rate in table)), rows)


def rules_tested(name: str, fixed_rate: float, primary: str | None = None) -> str:
    """Each arm on the test seeds at its own rate and thresholds, and at lag 0's rate, against no rule."""
    trials = rule_trials(name)
    best = chosen(trials)
    tested = trials[~trials["tuning"]]
    keys = pd.Series([tuple(row) for row in tested[KEYS].to_numpy()], index=tested.index)
    own = tested[keys == tested["arm"].map(best)]
    fixed = tested[tested[RATE] == fixed_rate]
    wide, wide_fixed = (part.pivot_table(index="seed", columns="arm", values="area") for part in (own, fixed))
    arms = [arm for arm in trials["arm"].drop_duplicates() if arm in wide]
    pairs = [(arm, "none") for arm in arms if arm != "none"]
    tests = contrasts(wide, pairs, primary=(primary, "none") if primary else None).set_index("setting")
    fired = own.groupby("arm")["fired"].mean()
    rows = []
    for arm in arms:
        rate, fresh, stale = best[arm]
        limits = f", {fresh:g}/{stale:g}" if arm.startswith("kl") else ""
        at_fixed = mean_and_interval(wide_fixed[arm]) if arm in wide_fixed else "–"
        row = [arm, f"{rate:g}{limits}", wide[arm].count(), f"{100 * fired[arm]:.0f}", mean_and_interval(wide[arm])]
        if arm in tests.index:
            test = tests.loc[arm]
            row += [f"{number(test['difference'], True)} [{number(test['low'], True)}, {number(test['high'], True)}]",
                    p_value(test["p_holm"]), p_value(test["p_equivalent"]), test["verdict"]]  # fmt: skip
        else:
            row += ["–"] * 4
        rows.append([*row, at_fixed])
    head = ("arm", "rate, thresholds", "seeds", "steps it acted on, %", "area", "less none [95 %]", "p (Holm)",
            "p (equivalent)", "verdict", f"area at {fixed_rate:g}")  # fmt: skip
    return markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "e0": e0, "e0-tests": e0_tests,
    "e1-surface": e1_surface, "e1-1": lambda: e1_table(1), "e1-4": lambda: e1_table(4), "slopes": slopes,
    "e1-repair": e1_repair,
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
