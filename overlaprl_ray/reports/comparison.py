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
from overlaprl_ray.reports.statistics import holm, interval, paired_columns
from overlaprl_ray.reports.trials import effective, labels, shown, varying

SIGNIFICANT = 0.05


def by_seed(results: Results, values: pd.Series, names: list[str] | None = None) -> pd.DataFrame:
    """A value per trial as a table of seeds × settings of the finished trials; repeats of both are averaged.

    `names`: what makes a setting; default what varies.
    """
    trials = results.trials
    known = trials[(trials["status"] == "done") & trials["mode"].notna()]
    table = pd.DataFrame({"seed": known["seed"], "setting": labels(known, names or varying(trials))})
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
    pair), p, p_holm, verdict; attrs: metric, budget, at, baseline. Raises `ConfigError` for a baseline that names no
    one setting.
    """
    done = results.done
    spent = common_budget(curves(done, metric, budget)) if at is None else at
    table = by_seed(results, values_at(done, metric, budget, spent))
    base = find_setting(results, baseline)
    others = [name for name in table.columns if name != base]
    held_to = table[base].to_numpy() if base in table else np.full(len(table), np.nan)
    values = table[others].to_numpy()
    out = pd.DataFrame({"setting": others, **_columns(values, np.broadcast_to(held_to[:, None], values.shape))})
    out.attrs |= {"metric": metric, "budget": budget, "at": spent, "baseline": base}
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


def _columns(values: np.ndarray, held_to: np.ndarray) -> dict[str, Any]:
    """Comparisons of (seeds, comparisons) values with what each is held to, as the columns after `setting`."""
    differences = values - held_to
    found = paired_columns(differences)
    both, n = np.isfinite(differences), found["n"]
    with np.errstate(invalid="ignore"):
        means = [np.where(both, side, 0.0).sum(axis=0) / n for side in (values, held_to)]
    mean = found["mean"]
    corrected = holm(found["p"])
    verdicts = {
        "no common seed": n == 0, "identical": found["identical"], "one pair: no interval": n == 1,
        "higher": (corrected < SIGNIFICANT) & (mean > 0), "lower": corrected < SIGNIFICANT,
    }  # fmt: skip
    verdict = np.select(list(verdicts.values()), list(verdicts), "cannot be told apart")
    return {
        "n": n,
        "value": means[0],
        "baseline": means[1],
        "difference": mean,
        **{name: found[name] for name in ("low", "high", "p")},
        "p_holm": corrected,
        "verdict": verdict,
    }


def find_setting(results: Results, wanted: str | Mapping[str, Any]) -> str:
    """The label of the one setting that has these values, by dotted or last name; values compare as they are shown.

    Raises `ConfigError` where none or several do.
    """
    trials = results.trials[results.trials["mode"].notna()]
    names = labels(trials, varying(results.trials))
    known = list(names.drop_duplicates())
    if isinstance(wanted, str):
        hits = [name for name in known if name == wanted]
    else:
        keep = pd.Series(True, index=trials.index)
        for name, value in wanted.items():
            column = next((c for c in trials.columns if name == c or c.rpartition(".")[2] == name), None)
            if column is None:
                raise ConfigError(f"baseline {name}={value}: no such setting; settings: {'; '.join(known)}")
            keep &= trials[column].map(shown) == shown(value)
        hits = list(names[keep].drop_duplicates())
    if len(hits) != 1:
        how = "no setting is that" if not hits else f"{len(hits)} settings are that"
        raise ConfigError(f"baseline {wanted}: {how}; name one of: {'; '.join(hits or known) or 'none there'}")
    return str(hits[0])


def default_baseline(results: Results) -> str | None:
    """What others are held to: `sync`, else the shortest lag without a rule, else the first; None without a setting."""
    trials = results.trials[results.trials["mode"].notna()]
    if trials.empty:
        return None
    order = trials.assign(_rule=trials["rule"] != "none", _sync=trials["mode"] != "sync")
    first = order.sort_values(["_sync", "_rule", "lag"], kind="stable").index[0]
    return str(labels(trials, varying(results.trials))[first])


def best_plain(results: Results) -> str | None:
    """The setting without a staleness rule that ended with the highest reward: what a rule has to beat, if any."""
    table = by_seed(results, results.done.trials.set_index("trial")["reward_last_10"])
    known = results.trials[results.trials["rule"] == "none"]
    means = table[[name for name in table if name in set(labels(known, varying(results.trials)))]].mean()
    return None if means.empty else str(means.idxmax())


def pairwise(
    results: Results, metric: str = "reward", budget: Budget = "steps", at: float | None = None
) -> pd.DataFrame:
    """All pairs of settings, columns as in `compare` with `setting` against `other`; Holm over all of them."""
    done = results.done
    table = by_seed(results, values_at(done, metric, budget, at))
    first, second = np.triu_indices(len(table.columns), k=1)
    values, names = table.to_numpy(), table.columns.to_numpy()
    return pd.DataFrame(
        {"setting": names[first], "other": names[second], **_columns(values[:, first], values[:, second])}
    )


def ranking(
    results: Results, metric: str = "reward", budget: Budget = "steps", at: float | None = None
) -> pd.DataFrame:
    """Settings by mean, highest first, and for each the ranks that it is identical to and cannot be told apart from.

    A rank by itself says nothing: two settings are told apart only if their pairs differ at 5 % after Holm's correction
    over all pairs of settings, which also pays for having picked the best one afterwards.
    """
    table = by_seed(results, values_at(results.done, metric, budget, at))
    pairs = pairwise(results, metric, budget, at)
    order = list(table.mean().sort_values(ascending=False, kind="stable").index)
    rank = {name: place for place, name in enumerate(order, start=1)}
    near: dict[str, dict[str, list[int]]] = {name: {"identical": [], "open": []} for name in order}
    for a, b, verdict in zip(pairs["setting"], pairs["other"], pairs["verdict"], strict=True):
        if verdict not in ("higher", "lower"):
            kind = "identical" if verdict == "identical" else "open"
            near[a][kind].append(rank[b])
            near[b][kind].append(rank[a])
    rows = []
    for name in order:
        found = interval(table[name].to_numpy())
        text = {kind: ", ".join(str(place) for place in sorted(ranks)) for kind, ranks in near[name].items()}
        rows.append({"rank": rank[name], "setting": name, "n": found.n, "mean": found.mean, "low": found.low,
                     "high": found.high, "identical_to": text["identical"],
                     "cannot_be_told_apart_from": text["open"]})  # fmt: skip
    columns = ["rank", "setting", "n", "mean", "low", "high", "identical_to", "cannot_be_told_apart_from"]
    return pd.DataFrame(rows, columns=columns)


# ---- two sweeps ----


def shared_names(first: Results, second: Results) -> list[str]:
    """What makes a setting when two sweeps are compared: whatever varies within either of them."""
    order = [name for results in (first, second) for name in effective(results.trials)]
    found = {*varying(first.trials), *varying(second.trials)}
    return [name for name in dict.fromkeys(order) if name in found]


def throughout(first: Results, second: Results) -> dict[str, tuple[str, str]]:
    """Settings that are one value in all of the first sweep and another in all of the second: what is compared."""
    out = {}
    shared = shared_names(first, second)
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
    found = {**curves(first.done, metric), **{f"{trial} ": c for trial, c in curves(second.done, metric).items()}}
    at = common_budget(found)
    tables = [by_seed(r, values_at(r.done, metric, "steps", at), names) for r in (first, second)]
    shared = [name for name in tables[1] if name in tables[0]]
    seeds = tables[0].index.union(tables[1].index)
    held_to, values = (table[shared].reindex(seeds).to_numpy(np.float64) for table in tables)
    out = pd.DataFrame({"setting": shared, **_columns(values, held_to)})
    out.attrs |= {"metric": metric, "budget": "steps", "at": at}
    return out
