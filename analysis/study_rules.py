"""The study's tables of rules and thresholds (blocks E2b and E3)."""

import pandas as pd
from scipy import stats
from study_cells import RATE, block, markdown, mean_and_interval, number, p_value, tested_cells

from overlaprl_ray.reports.study import contrasts

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


def rules_tested(name: str, primary: str | None = None) -> str:
    """Each arm on the test seeds at its own rate and thresholds, against no rule."""
    trials = rule_trials(name)
    best = chosen(trials)
    tested = trials[~trials["tuning"]]
    keys = pd.Series([tuple(row) for row in tested[KEYS].to_numpy()], index=tested.index)
    own = tested[keys == tested["arm"].map(best)]
    wide = own.pivot_table(index="seed", columns="arm", values="area")
    tests = contrasts(wide, against_none(wide), primary=(primary, "none") if primary else None).set_index("setting")
    acted = own.groupby("arm")["fired"].mean()
    rows = []
    for arm in wide.mean().sort_values(ascending=False).index:
        rate, fresh, stale = best[arm]
        limits = f", {fresh:g}/{stale:g}" if arm.startswith("kl") else ""
        rows.append([arm + " (primary)" * (arm == primary), f"{rate:g}{limits}", f"{100 * acted[arm]:.0f}",
                     mean_and_interval(wide[arm]), *tested_cells(tests, arm)])  # fmt: skip
    head = ("arm", "rate, thresholds", "acted on, % of steps", "area", "less none [95 %]", "p (Holm)", "p (equivalent)",
            "verdict")  # fmt: skip
    return markdown(head, rows)


def rules_at(name: str, rate: float) -> str:
    """Each arm that ran on the test seeds at a rate, whatever its own, against no rule at it."""
    trials = rule_trials(name)
    part = trials[~trials["tuning"] & (trials[RATE] == rate)]
    wide = part.pivot_table(index="seed", columns="arm", values="area")
    tests = contrasts(wide, against_none(wide)).set_index("setting")
    discarded = part.groupby("arm")["discarded"].mean()
    rows = [
        (arm, f"{100 * discarded[arm]:.0f}", mean_and_interval(wide[arm]), *tested_cells(tests, arm))
        for arm in wide.mean().sort_values(ascending=False).index
    ]
    head = ("arm", "discards, % of steps", "area", "less none [95 %]", "p (Holm)", "p (equivalent)", "verdict")
    return markdown(head, rows)


def against_none(wide: pd.DataFrame) -> list[tuple[str, str]]:
    return [(arm, "none") for arm in wide if arm != "none"]


def thresholds() -> str:
    """Rule kl on the update: no rule beside the least and the greatest mean area of ten pairs, by lag and rate.

    p: Friedman's test that the pairs are alike, each seed a block.
    """
    judged, plain = block("e3"), block("e1")
    rows = []
    for (lag, rate), part in judged.groupby(["lag", RATE]):
        none = plain[(plain["lag"] == lag) & (plain[RATE] == rate) & (plain["grpo.num_minibatches"] == 1)]
        none = none[none["seed"].isin(part["seed"])]
        wide = part.pivot_table(index="seed", columns=KEYS[1:], values="area")
        means = wide.mean()
        least, most = (f"{number(means[pair])} ({pair[0]:g}/{pair[1]:g})" for pair in (means.idxmin(), means.idxmax()))
        same = bool((wide.nunique(axis=1) == 1).all())
        p = 1.0 if same else stats.friedmanchisquare(*(wide[pair] for pair in wide)).pvalue
        rows.append((int(lag), f"{rate:g}", len(wide), mean_and_interval(none["area"]), least, most,
                     number(means.max() - means.min()), p_value(p)))  # fmt: skip
    head = ("lag", "rate", "seeds", "no rule", "least (kl_fresh/kl_stale)", "greatest", "range", "p (pairs alike)")
    return markdown(head, rows)
