"""A study's outcomes, its tests, and the configurations behind its rows; `save(..., compact=True)` makes its tables.

The outcome is the area: mean held-out accuracy over all evaluations after step 0. Arms are compared seed by seed.

    results = load("analysis/results/e0")
    areas = by_seed(results, outcomes(results).set_index("trial")["area"])
    contrasts(areas, [("lag 1, clip_eps null", "lag 0, clip_eps null")])
"""

import json
from typing import Any

import numpy as np
import pandas as pd

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import build_config, merge
from overlaprl_ray.reports.comparison import SIGNIFICANT, differences
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.statistics import equivalence, holm
from overlaprl_ray.reports.trials import is_setting, missing

MARGIN = 0.05  # of accuracy: what differs by less counts as equal
RATE = "grpo.lr"


def outcomes(results: Results) -> pd.DataFrame:
    """The finished trials with `area`, and `fired` and `discarded`, shares of the steps that a rule acted on."""
    done = results.done
    area = done.evals[done.evals["step"] > 0].groupby("trial", observed=True)["accuracy"].mean()
    area.index = area.index.astype("str")
    acted = done.trials[["decisions.stale", "decisions.discard"]].sum(axis=1)
    return done.trials.assign(
        area=done.trials["trial"].map(area).astype("float64"),
        fired=acted / done.trials["steps"],
        discarded=done.trials["decisions.discard"] / done.trials["steps"],
    )


def contrasts(
    table: pd.DataFrame, pairs: list[tuple[str, str]], margin: float = MARGIN, primary: tuple[str, str] | None = None
) -> pd.DataFrame:
    """Arms of a table of seeds × arms, each against another, paired by seed; a row per pair.

    Columns: setting, held_to, n, value, baseline, difference, low, high (95 % t), p (two-sided), p_holm (over the
    secondaries: the `primary` pair keeps its p), p_equivalent (two one-sided tests: the difference lies within
    `margin`), verdict: higher, lower, equivalent or undecided.
    """
    arms, others = (table[[pair[side] for pair in pairs]].set_axis(range(len(pairs)), axis=1) for side in (0, 1))
    out = differences(arms, others)
    out["setting"], names = [arm for arm, _ in pairs], [other for _, other in pairs]
    out.insert(1, "held_to", names)
    first = np.array([pair == primary for pair in pairs], dtype=bool)
    out["p_holm"] = np.where(first, out["p"], holm(out["p"].where(~first)))
    out["p_equivalent"] = equivalence(arms - others, margin).to_numpy()
    differs = out["p_holm"] < SIGNIFICANT
    verdicts = [differs & (out["difference"] > 0), differs, out["p_equivalent"] < SIGNIFICANT]
    return out.assign(verdict=np.select(verdicts, ["higher", "lower", "equivalent"], "undecided"))


def config_of(trial: pd.Series) -> ExperimentConfig:
    """The configuration of a row of `trials`, as it was run."""

    def value(found: Any) -> Any:
        if missing(found):
            return None
        found = found.item() if isinstance(found, np.generic) else found
        return json.loads(found) if isinstance(found, str) and found.startswith("[") else found

    return build_config(merge({}, {name: value(v) for name, v in trial.items() if is_setting(str(name))}))
