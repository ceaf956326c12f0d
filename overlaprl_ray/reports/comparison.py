"""Which setting did better, by how much, and whether that can be told: pairs of runs with the same seed.

A run's seed fixes its prompts and its luck in sampling, so differences within a seed are less noisy than differences of
means. Intervals are 95 % t intervals of single comparisons; `p_holm` is corrected for all comparisons of the table.

    compare(results, {"mode": "sync"}, "reward", "seconds")[["setting", "n", "difference", "low", "high", "p_holm"]]
    ranking(results, "accuracy")
"""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pandas as pd

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.reports.budgets import Budget, common_budget, curves, values_at
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.statistics import holm, paired
from overlaprl_ray.reports.trials import effective, labels, shown, varying

SIGNIFICANT = 0.05


def by_seed(results: Results, values: pd.Series, names: list[str] | None = None) -> pd.DataFrame:
    """A value per trial as a table of seeds × settings of the finished trials; repeats of both are averaged.

    `names`: what makes a setting; default what varies.
    """
    known = results.trials[(results.trials["status"] == "done") & results.trials["mode"].notna()]
    settings = results.settings[known["trial"]] if names is None else labels(known, names)
    table = pd.DataFrame({"seed": known["seed"], "setting": settings.to_numpy()})
    table["value"] = values.reindex(known["trial"]).to_numpy()
    wide = table.dropna().pivot_table(index="seed", columns="setting", values="value", aggfunc="mean")
    return wide.reindex(columns=[s for s in table["setting"].drop_duplicates() if s in wide.columns])


def compare(
    results: Results,
    baseline: str | Mapping[str, Any],
    metric: str = "reward",
    budget: Budget = "steps",
    at: float | None = None,
) -> pd.DataFrame:
    """Every other setting against a baseline, paired by seed, at the same budget of steps, tokens or seconds.

    `baseline` is a setting's label or some of its values, as `{"mode": "sync", "lag": 1}`; `metric` is "accuracy" or a
    column of history (its mean over ten steps). `at` None: the most that every finished run has spent. Returns a row
    per setting: n (pairs), value and baseline (means over those pairs), difference, low, high (95 %; NaN from one
    pair), p, p_holm, verdict; attrs: metric, budget, at. Raises `ConfigError` for a baseline that names no one setting.
    """
    base = find_setting(results, baseline)
    spent = common_budget(curves(results.done, metric, budget)) if at is None else at
    table = by_seed(results, values_at(results.done, metric, budget, spent))
    values = table.drop(columns=base, errors="ignore")
    held_to = table.get(base, pd.Series(np.nan, index=table.index))
    out = differences(values, pd.DataFrame(dict.fromkeys(values, held_to), index=table.index, columns=values.columns))
    out.attrs |= {"metric": metric, "budget": budget, "at": spent}
    return out


def compare_budgets(
    results: Results, baseline: str | Mapping[str, Any] | None, metric: str = "reward", clock: bool = True
) -> pd.DataFrame:
    """`compare` at equal steps, tokens and (with `clock`) seconds, one under another; `budget` and `at` in front.

    Empty where nothing can be compared: no baseline, no finished run, no evaluations.
    """
    table = results.evals if metric == "accuracy" else results.history
    if baseline is None or results.done.trials.empty or table.empty:
        return pd.DataFrame()
    parts = [compare(results, baseline, metric, budget) for budget in get_args(Budget) if clock or budget != "seconds"]
    for part in parts:
        part.insert(0, "budget", part.attrs["budget"])
        part.insert(1, "at", part.attrs["at"])
    return pd.concat(parts, ignore_index=True)


def differences(values: pd.DataFrame, held_to: pd.DataFrame) -> pd.DataFrame:
    """Each column of seeds × settings against the same column of what it is held to; a row per setting."""
    gaps = values - held_to
    found, both = paired(gaps), gaps.notna()
    corrected = holm(found["p"])
    verdicts = {
        "no common seed": found["n"] == 0, "identical": found["identical"], "one pair: no interval": found["n"] == 1,
        "higher": (corrected < SIGNIFICANT) & (found["mean"] > 0), "lower": corrected < SIGNIFICANT,
    }  # fmt: skip
    columns = {
        "setting": found.index, "n": found["n"], "value": values.where(both).mean(),
        "baseline": held_to.where(both).mean(), "difference": found["mean"], **found[["low", "high", "p"]],
        "p_holm": corrected, "verdict": np.select(list(verdicts.values()), list(verdicts), "cannot be told apart"),
    }  # fmt: skip
    return pd.DataFrame(columns).reset_index(drop=True)


def find_setting(results: Results, wanted: str | Mapping[str, Any]) -> str:
    """The label of the one setting that has these values, by dotted or last name; values compare as they are shown.

    Raises `ConfigError` where none or several do.
    """
    trials = results.trials[results.trials["mode"].notna()]
    known = list(results.settings.unique())
    keep = pd.Series(True, index=trials.index)
    if isinstance(wanted, str):
        keep = trials["trial"].map(results.settings) == wanted
    for name, value in wanted.items() if isinstance(wanted, Mapping) else ():
        column = next((c for c in trials.columns if name == c or c.rpartition(".")[2] == name), None)
        if column is None:
            raise ConfigError(f"baseline {name}={value}: no such setting; settings: {'; '.join(known)}")
        keep &= trials[column].map(shown) == shown(value)
    hits = list(results.settings[trials["trial"][keep]].unique())
    if len(hits) != 1:
        how = "no setting is that" if not hits else f"{len(hits)} settings are that"
        raise ConfigError(f"baseline {wanted}: {how}; name one of: {'; '.join(hits or known) or 'none there'}")
    return str(hits[0])


def default_baseline(results: Results) -> str | None:
    """What others are held to: `sync`, else the shortest lag without a rule, else the first; None without a setting."""
    trials = results.trials[results.trials["mode"].notna()]
    order = trials.assign(_rule=trials["rule"] != "none", _sync=trials["mode"] != "sync")
    first = order.sort_values(["_sync", "_rule", "lag"], kind="stable").head(1)["trial"]
    return None if first.empty else str(results.settings[first].iloc[0])


def best_plain(results: Results) -> str | None:
    """The setting without a staleness rule that ended with the highest reward: what a rule has to beat, if any."""
    plain = results.of(results.trials["rule"] == "none").trials.set_index("trial")["reward_last_10"]
    means = by_seed(results, plain).mean()
    return None if means.empty else str(means.idxmax())


def ranking(results: Results, metric: str = "reward", budget: Budget = "steps") -> pd.DataFrame:
    """Settings by mean, highest first, and for each the ranks that it is identical to and cannot be told apart from.

    A rank by itself says nothing: two settings are told apart only if their pairs differ at 5 % after Holm's correction
    over all pairs of settings, which also pays for having picked the best one afterwards.
    """
    table = by_seed(results, values_at(results.done, metric, budget))
    found = paired(table).sort_values("mean", ascending=False, kind="stable")
    values = table[found.index].to_numpy()
    first, second = np.triu_indices(len(found), k=1)
    verdict = differences(pd.DataFrame(values[:, first]), pd.DataFrame(values[:, second]))["verdict"]

    def ranks(which: pd.Series) -> list[str]:
        square = np.zeros((len(found), len(found)), dtype=bool)
        square[first, second] = square[second, first] = which
        return [", ".join(str(place) for place in np.flatnonzero(row) + 1) for row in square]

    same = verdict == "identical"
    out = found.reset_index(names="setting").drop(columns=["p", "identical"])
    out.insert(0, "rank", np.arange(1, len(out) + 1))
    return out.assign(
        identical_to=ranks(same), cannot_be_told_apart_from=ranks(~same & ~verdict.isin(["higher", "lower"]))
    )


# ---- two sweeps ----


def shared_names(first: Results, second: Results) -> list[str]:
    """What makes a setting when two sweeps are compared: whatever varies within either of them."""
    found = {*varying(first.trials), *varying(second.trials)}
    order = [*effective(first.trials), *effective(second.trials)]
    return [name for name in dict.fromkeys(order) if name in found]


def throughout(first: Results, second: Results) -> dict[str, tuple[str, str]]:
    """Settings that are one value in all of the first sweep and another in all of the second: what is compared."""
    out, shared = {}, shared_names(first, second)
    settings = [effective(results.trials[results.trials["mode"].notna()]) for results in (first, second)]
    for name in dict.fromkeys([*settings[0], *settings[1]]):
        values = [sorted({shown(v) for v in table.get(name, pd.Series(["not there"]))}) for table in settings]
        if name not in shared and values[0] != values[1]:
            out[name] = (", ".join(values[0]), ", ".join(values[1]))
    return out


def compare_sweeps(first: Results, second: Results, metric: str = "reward") -> pd.DataFrame:
    """Each setting that both sweeps have, the second (`value`) against the first (`baseline`), paired by seed.

    At the steps that all finished runs of both have; columns as in `compare`. Settings are matched by what varies
    within either sweep, so that two sweeps that differ in one thing throughout are compared setting by setting.
    """
    names = shared_names(first, second)
    at = float(np.nanmin([common_budget(curves(results.done, metric)) for results in (first, second)]))
    held_to, values = (by_seed(r, values_at(r.done, metric, "steps", at), names) for r in (first, second))
    shared = [name for name in values if name in held_to]
    out = differences(*(table[shared] for table in (values, held_to)))
    out.attrs |= {"metric": metric, "budget": "steps", "at": at}
    return out
