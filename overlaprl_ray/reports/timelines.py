"""Who worked when: the timelines of a sweep's runs in one picture."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from overlaprl_ray.reports.figures import note
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.trials import MODES
from overlaprl_ray.runs.gantt import figure_of, window


def gantt(results: Results) -> Figure:
    """Who worked when, in one run of each mode (lowest seed) whose folder still has its timeline."""
    trials = results.trials
    if "folder" not in trials:
        return note("Saved tables hold no timelines: give the folders of runs for a Gantt chart.")
    lines: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        for folder in trials[trials["mode"] == mode].sort_values("seed", kind="stable")["folder"].dropna():
            found = _timeline(Path(folder) / "timeline.json")
            if found is not None:
                lines[mode] = found
                break
    return figure_of(lines) if lines else note("No run's folder holds a timeline.json to draw.")


def _timeline(path: Path) -> dict[str, Any] | None:
    """A run's trace; None where there is none, or none that is whole."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        window(trace)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return trace
