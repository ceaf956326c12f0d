"""One row per trial: a run folder's settings as dotted columns, its summary, and which settings tell trials apart.

row = trial_row(Path("runs/x"), problems=[]); row["grpo.lr"], row["accuracy_final"]
varying(trials)        # ["pipeline.mode", "pipeline.lag"]
labels(trials)         # "mode sync, lag 8" for each trial
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import NO_PART, flatten

GROUPS = tuple(ExperimentConfig.model_fields)  # the first part of a setting's dotted name
FILES = ("config.yaml", "metrics.jsonl", "summary.json", "error.txt")  # any of them makes a folder a trial
MODES = ("sync", "async", "staleness", "overlap")
JUDGING = ("staleness", "overlap")  # modes with a staleness rule
NO_EFFECT = "-"
CASE = "case"  # what a sweep's file calls a combination of settings
NUMBERS = (  # columns that a table of trials has, whether or not a run got there
    "seed", "steps", "tokens", "wall_s", "steps_per_s", "reward_first_10", "reward_last_10", "accuracy_start",
    "accuracy_final", "accuracy_best", "decisions.fresh", "decisions.stale", "decisions.discard", "overlap_fraction",
)  # fmt: skip
_OF_KL = ("kl_fresh", "kl_stale", "min_weight", "threshold_unit", "granularity", "apply_to")
_OF_OTHERS = {"max_lag": "version", "opsm_delta": "opsm", "m2po_tau": "m2po"}
_YAML = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # five times as fast, and there are thousands


def is_setting(column: str) -> bool:
    """Whether a column of `trials` is a setting of the run's configuration."""
    return column == "seed" or (column.partition(".")[0] in GROUPS and "." in column)


def trial_row(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Settings, status, environment and summary of a run folder, finished or not; what cannot be read is said."""
    config = _flat(read_mapping(folder / "config.yaml", problems))
    if config and not {"pipeline.mode", "seed"} <= config.keys():
        problems.append(f"{folder / 'config.yaml'}: no mode or no seed in it, cut short?; the run is counted nowhere")
        config = {}
    summary = read_mapping(folder / "summary.json", problems)
    path = folder / "error.txt"
    error = " ".join(path.read_text(encoding="utf-8", errors="replace").split()) if path.exists() else None
    status = str(summary.get("status") or "running")
    row = {"trial": folder.name, CASE: _case(folder), "error": error, **config}
    row["status"] = "error" if error is not None and status != "done" else status
    row.pop("output.dir", None)
    mode = config.get("pipeline.mode")  # mode, lag and rule as the run had them: `sync` is never ahead or judged
    row |= {"mode": mode, "lag": 0 if mode == "sync" else config.get("pipeline.lag")}
    row["rule"] = config.get("staleness.rule") if mode in JUDGING else "none" if mode else None
    # what the configuration says already, and tables, are left out of the summary
    numbers = {name: v for name, v in flatten(summary) if not isinstance(v, str | list) and name not in row}
    return row | _environment(read_mapping(folder / "environment.json", problems)) | numbers


def read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """A YAML or JSON file's mapping; empty where there is no such file, or none that can be read."""
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_YAML)
        return dict(found)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        problems.append(f"{path}: cannot be read ({' '.join(str(error).split())[:100]}); left out")
        return {}


def _case(folder: Path) -> str | None:
    """The name of a sweep's trial's case in the sweep's plan."""
    plan = folder.parent.parent / "plan.json"
    if folder.parent.name != "trials" or not plan.is_file():
        return None
    return _cases(plan, plan.stat().st_mtime_ns).get(folder.name)


@functools.lru_cache(maxsize=16)
def _cases(plan: Path, changed: int) -> dict[str, str]:
    try:
        return {row["trial"]: row["case"] for row in json.loads(plan.read_text(encoding="utf-8")) if row.get("case")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # whatever is there, it is no plan of ours
        return {}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings as dotted names; lists as JSON text, so that a column has one type and can be grouped by."""
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in flatten(values)}


def _environment(found: Mapping[str, Any]) -> dict[str, Any]:
    versions = found.get("versions") or {}
    about = {"commit": found.get("git_commit"), "cpu": found.get("cpu"), "cpus": found.get("cpus")}
    about["algorithm"] = found.get("algorithm")
    about |= {"gpus": ", ".join(found.get("gpus") or []), "torch": versions.get("torch"), "ray": versions.get("ray")}
    return {f"environment.{name}": value for name, value in about.items()} if found else {}


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Trial rows as a table: settings first, in the order of the configuration, then results; `NUMBERS` always."""
    table = pd.DataFrame(rows)
    table = table.assign(**{name: math.nan for name in NUMBERS if name not in table})
    head = ["trial", "source", "folder", CASE, "status", "error"]
    settings = [name for name in table.columns if is_setting(name)]
    rest = [name for name in table.columns if name not in head and not is_setting(name)]
    return table.reindex(columns=[*head, *settings, *rest])


# ---- settings that tell trials apart ----


def effective(trials: pd.DataFrame) -> pd.DataFrame:
    """The settings that can change a number of a run, without the seed; "-" where one has no effect in that trial.

    `sync` is never ahead, so its lag is "-"; a rule's thresholds are "-" under every other rule and without one.
    """
    names = [name for name in trials.columns if is_setting(name) and name != "seed" and not name.startswith(NO_PART)]
    out = trials[names].astype(object)
    if "pipeline.lag" in out:
        out.loc[trials["mode"] == "sync", "pipeline.lag"] = NO_EFFECT
    for leaf, rule in {**dict.fromkeys(_OF_KL, "kl"), **_OF_OTHERS}.items():
        if f"staleness.{leaf}" in out:
            out.loc[trials["rule"] != rule, f"staleness.{leaf}"] = NO_EFFECT
    if "staleness.rule" in out:
        out.loc[~trials["mode"].isin(JUDGING), "staleness.rule"] = NO_EFFECT
    return out


def varying(trials: pd.DataFrame) -> list[str]:
    """Settings that differ between trials in which they have an effect, in the order of the configuration.

    The seed is left out, and what changes no number of a run, as its folder. A trial whose configuration could not be
    read has no settings and is left out.
    """
    known = trials[trials["mode"].notna()]
    constant = [name for name in known if is_setting(name) and known[name].nunique(dropna=False) < 2]
    settings = effective(known.drop(columns=constant))
    return [name for name in settings if settings[name][settings[name].ne(NO_EFFECT)].nunique(dropna=False) > 1]


def within_cases(trials: pd.DataFrame, names: list[str]) -> list[str]:
    """The case, where every trial has one, and the settings among `names` that differ within some case."""
    if CASE not in trials or trials[CASE].isna().any() or trials.empty:
        return names
    values = effective(trials).reindex(columns=names).groupby(trials[CASE]).nunique(dropna=False)
    return [CASE, *(name for name in names if (values[name] > 1).any())]


def labels(trials: pd.DataFrame, names: list[str] | None = None) -> pd.Series:
    """What each trial is called beside the others, by its varying settings: "mode async, lag 8"; one text each.

    Where a sweep names its cases the name stands for the settings that make it. Numbers have six digits, or all they
    have where settings differ beyond those.
    """
    names = within_cases(trials, varying(trials) if names is None else names)
    shorts = {name: "" if name == CASE else f"{short} " for name, short in zip(names, short_names(names), strict=True)}
    settings = effective(trials).assign(**{CASE: trials.get(CASE)}).reindex(columns=names)
    rows = [tuple(None if missing(v) else v for v in row) for row in settings.itertuples(index=False, name=None)]

    def texts(show: Callable[[Any], str]) -> list[str]:
        parts = [[shorts[n] + show(v) for n, v in zip(names, row, strict=True) if v != NO_EFFECT] for row in rows]
        return [", ".join(part) or "all runs" for part in parts]

    found = texts(shown)
    if len(set(found)) < len(set(rows)):
        found = texts(lambda value: repr(value) if isinstance(value, float) else shown(value))
    return pd.Series(found, index=trials.index, dtype="str")


def short_names(names: list[str], taken: Iterable[str] = ()) -> list[str]:
    """Settings by the last part of their dotted name, where that is clear and not `taken`."""
    leaves = [name.rpartition(".")[2] for name in names]
    clear = [leaves.count(leaf) == 1 and leaf not in taken for leaf in leaves]
    return [leaf if one else name for leaf, name, one in zip(leaves, names, clear, strict=True)]


def ordered(trials: pd.DataFrame) -> pd.DataFrame:
    """Trials by their varying settings (modes as design has them, numbers by size) and seed."""
    settings = effective(trials)[varying(trials)].assign(seed=trials["seed"])

    def place(value: Any) -> tuple[int, float, str]:
        value = MODES.index(value) if value in MODES else value
        is_number = isinstance(value, int | float) and not missing(value)
        return (0, float(value), "") if is_number else (1, 0.0, str(value))

    keys = settings.map(place).apply(tuple, axis=1) if len(settings) else pd.Series(dtype="object")
    return trials.loc[sorted(keys.index, key=keys.get)]


def missing(value: Any) -> bool:
    """Whether a setting is null, which tables hold as None or NaN."""
    return value is None or value is pd.NA or value != value


def shown(value: Any) -> str:
    """A setting's value as people write it."""
    if missing(value):
        return "null"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
