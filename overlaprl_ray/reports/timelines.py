"""Who worked when: the timelines of a sweep's runs in one picture."""

from pathlib import Path

from matplotlib.figure import Figure

from overlaprl_ray.reports.figures import note
from overlaprl_ray.reports.loading import Results
from overlaprl_ray.reports.trials import MODES
from overlaprl_ray.runs.gantt import figure_of
from overlaprl_ray.runs.timeline import Timeline, load_trace


def gantt(results: Results) -> Figure:
    """Who worked when, in one run of each mode (lowest seed) whose folder still has its timeline."""
    trials = results.trials
    if "folder" not in trials:
        return note("Saved tables hold no timelines: give the folders of runs for a Gantt chart.")
    lines: dict[str, Timeline] = {}
    for mode, folder in trials.sort_values("seed")[["mode", "folder"]].dropna().itertuples(index=False, name=None):
        if mode in lines:
            continue
        try:
            found = load_trace(Path(folder) / "timeline.json")
        except (OSError, ValueError, KeyError):  # none, or none that is whole
            continue
        if found.steps:
            lines[mode] = found
    known = {mode: lines[mode] for mode in MODES if mode in lines}
    return figure_of(known) if known else note("No run's folder holds a timeline.json to draw.")
