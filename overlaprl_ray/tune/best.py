"""Values chosen by one sweep and run by the next: which learning rate is best for each of the other settings.

The score is the area under the accuracy curve, the mean of all held-out evaluations after step 0, averaged over the
first sweep's seeds. The next sweep gets other seeds, so that what it reports took part in no choice.

    python scripts/sweep.py study_e1.yaml --serial                                      # every rate, three seeds
    python scripts/sweep.py study_e1.yaml --serial --tune.best_of runs/study_e1 --seeds 1000 1001 --dir runs/tested
"""

import dataclasses
from collections import defaultdict
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import config_hash
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runs.files import read_rows
from overlaprl_ray.tune.plan import Plan, TrialPlan, plan_trials
from overlaprl_ray.tune.spec import Sweep, load_sweep
from overlaprl_ray.tune.trainable import STOPPED, is_finished

Values = tuple[Any, ...]  # of the settings that are chosen
Scores = dict[str, dict[Values, list[float]]]  # arm (all other settings) -> values -> an area per seed


def keep_best(plan: Plan, sweep: Sweep, folder: Path) -> Plan:
    """The plan's trials that have their arm's best values. `ConfigError` where the first sweep cannot say which."""
    source, over = Path(sweep.tune.best_of or "").expanduser().absolute(), sweep.tune.best_over
    if source == folder.absolute():
        raise ConfigError(f"tune.best_of = '{source}': the sweep's own folder; give the new one another --dir")
    if not (source / "sweep.yaml").is_file():
        raise ConfigError(f"tune.best_of = '{source}': holds no sweep; run that first, or give its folder")
    tried = scores(plan_trials(load_sweep(source / "sweep.yaml"), source).trials, over)
    kept, dropped = [], list(plan.dropped)
    notes: dict[str, str] = {}  # by arm
    for trial in plan.trials:
        arm = config_hash(trial.config, "seed", *over)
        if arm not in tried:
            raise ConfigError(f"tune.best_of = '{source}': no finished trial there has the settings of {trial.point}")
        best = max(tried[arm], key=lambda values: fmean(tried[arm][values]))
        if values_of(trial.config, over) == best:
            kept.append(trial)
            notes.setdefault(arm, f"{_note(tried[arm], best, over)}: {trial.point}")
        else:
            dropped.append((trial.point, f"not the best {', '.join(over)} of its arm"))
    if missing := {config_hash(trial.config, "seed", *over) for trial in plan.trials} - notes.keys():
        raise ConfigError(
            f"tune.best_of = '{source}': for {len(missing)} arms the best {', '.join(over)} is not among this sweep's "
            "values; give both sweeps the same grid"
        )
    return dataclasses.replace(plan, trials=kept, dropped=dropped, notes=tuple(notes.values()))


def scores(trials: list[TrialPlan], over: list[str]) -> Scores:
    """The areas by arm and values of the trials that came to their end; one that was stopped early has no such area."""
    found: Scores = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        if is_finished(trial.folder) and not (trial.folder / STOPPED).exists():
            arm = config_hash(trial.config, "seed", *over)
            found[arm][values_of(trial.config, over)].append(area(trial.folder))
    return found


def area(folder: Path) -> float:
    """A run's mean accuracy over all evaluations after step 0."""
    return fmean(row["accuracy"] for row in read_rows(folder / "eval.jsonl") if row["step"] > 0)


def values_of(config: ExperimentConfig, names: list[str]) -> Values:
    """Settings by dotted name."""
    return tuple(attrgetter(name)(config) for name in names)


def _note(tried: dict[Values, list[float]], best: Values, over: list[str]) -> str:
    """What was chosen; a best number that is the least or the most of those tried may not be the best there is."""
    chosen = ", ".join(f"{name}={value}" for name, value in zip(over, best, strict=True))
    text = f"best of {len(tried)}: {chosen}, area {fmean(tried[best]):.3f} over {len(tried[best])} seeds"
    edges = [name for name, value, *grid in zip(over, best, *tried, strict=True) if _at_the_edge(value, {*grid})]
    return text + (f" (at the edge of what was tried: widen {', '.join(edges)})" if edges else "")


def _at_the_edge(value: Any, grid: set[Any]) -> bool:
    return len(grid) > 2 and all(isinstance(v, int | float) for v in grid) and value in (min(grid), max(grid))
