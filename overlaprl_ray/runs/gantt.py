"""A few steps of a run as bars, one lane per actor: who worked when, on which batch, with whose weights.

Only a few steps fit a picture that explains itself; the whole run is in the trace that it is drawn from.

    draw_gantt("zoom.png", load_trace("a/timeline.json"), first_step=40, last_step=46)
    draw_gantts("modes.png", {"sync": load_trace("a/timeline.json"), "overlap": load_trace("b/timeline.json")})
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlaprl_ray.runs.timeline import LANES, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 12  # steps in a picture: few enough to follow one batch by eye

# Okabe and Ito's colours, which colour-blind people tell apart; the text colour is the one that is readable on each.
COLOURS = {"load": "#4D4D4D", "generate": "#0072B2", "reference": "#E69F00", "train": "#009E73", "evaluate": "#F3DCE9"}
INK = {"generate": "white", "reference": "black", "train": "white", "evaluate": "#7A2E5B"}
IDLE, FRAME = "#E9E9E6", "#333333"
LEGEND = {
    "generate": "generate (7 ← w5: batch 7, with the weights after step 5)",
    "load": "take over weights",
    "reference": "score with the reference",
    "train": "judge and train",
    "evaluate": "held-out evaluation",
}
LEFT_IN, RIGHT_IN, TOP_IN, FOOT_IN, LANE_IN, GAP_IN = 0.95, 0.95, 0.36, 0.95, 0.42, 0.3  # inches


def draw_gantt(
    path: str | Path, timeline: Timeline, first_step: int | None = None, last_step: int | None = None
) -> None:
    """Draw a window of steps (default: the first dozen after warm-up) as a PNG. Raises `ValueError` without steps."""
    figure_of({"": timeline}, first_step, last_step).savefig(path)


def draw_gantts(
    path: str | Path, timelines: Mapping[str, Timeline], first_step: int | None = None, last_step: int | None = None
) -> None:
    """Draw several runs under one another, the same steps on the same time scale, so that the shorter one shows."""
    figure_of(timelines, first_step, last_step).savefig(path)


def window(timeline: Timeline, first_step: int | None = None, last_step: int | None = None) -> tuple[int, int, Span]:
    """(first step, last step, time span from the end of the step before to the end of the last one).

    A run too short for a dozen steps after warm-up shows its last dozen.
    """
    steps = timeline.steps
    if not steps:
        raise ValueError("a timeline without steps cannot be drawn")
    begin = min(timeline.warm_up, max(0, len(steps) - WINDOW)) + 1 if first_step is None else first_step
    begin = min(max(1, begin), len(steps))
    end = begin + WINDOW - 1 if last_step is None else last_step
    end = min(max(begin, end), len(steps))
    start = steps[begin - 2].spans["train"][1] if begin > 1 else min(span[0] for span in steps[0].spans.values())
    return begin, end, (start, steps[end - 1].spans["train"][1])


def figure_of(
    timelines: Mapping[str, Timeline], first_step: int | None = None, last_step: int | None = None
) -> "Figure":
    """The picture itself; a single timeline may have the empty name, and then keeps its own clock."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: it keeps state that threads would share

    windows = {name: window(timeline, first_step, last_step) for name, timeline in timelines.items()}
    longest = max(end - start for _, _, (start, end) in windows.values())
    lanes = {name: _lanes(timeline) for name, timeline in timelines.items()}
    width = 13.0
    heights = [LANE_IN * len(lanes[name]) for name in timelines]
    height = sum(heights) + len(heights) * TOP_IN + (len(heights) - 1) * GAP_IN + FOOT_IN
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    top = height
    for panel, (name, timeline) in enumerate(timelines.items()):
        top -= TOP_IN + heights[panel]
        box = (LEFT_IN / width, top / height, 1 - (LEFT_IN + RIGHT_IN) / width, heights[panel] / height)
        axes = figure.add_axes(box)
        _panel(axes, timeline, lanes[name], windows[name], longest, single=len(timelines) == 1)
        _title(axes, name, timeline, windows[name])
        top -= GAP_IN
        if panel < len(timelines) - 1:
            axes.tick_params(bottom=False, labelbottom=False)  # the last panel's scale is everybody's
            axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("seconds since the run started" if len(timelines) == 1 else "seconds, from the same step on")
    _legend(figure, timelines, windows)
    return figure


def _lanes(timeline: Timeline) -> list[str]:
    """The actors there were, first at the top; without a reference model two."""
    used = {LANES[stage] for step in timeline.steps for stage in step.spans}
    return [lane for lane in dict.fromkeys(LANES.values()) if lane in used]


@dataclass(frozen=True)
class _Bar:
    """One bar within the window; `labels` from long to short, `batch` None for an evaluation."""

    stage: str
    span: Span
    labels: list[str]
    batch: int | None
    discarded: bool = False


def _bars(timeline: Timeline, view: Span) -> list[_Bar]:
    """All there is to see in a span of time, whichever step it belongs to."""
    bars = []
    for step in timeline.steps:
        for stage, span in step.spans.items():
            gone = stage == "train" and step.decision == "discard"
            labels = [] if stage == "load" else [str(step.step)]
            if stage == "generate":
                labels.insert(0, f"{step.step} ← w{step.weights_step}")
            if gone:
                labels[:0] = [f"{step.step} discarded", f"{step.step} ×"]
            bars.append(_Bar(stage, span, labels, step.step, gone))
    for done in timeline.evaluations:
        bars.append(_Bar("evaluate", done.span, [f"evaluate w{done.step}", f"w{done.step}"], None))
    clipped = [replace(bar, span=(max(bar.span[0], view[0]), min(bar.span[1], view[1]))) for bar in bars]
    return [bar for bar in clipped if bar.span[1] > bar.span[0]]


def _panel(
    axes: Any, timeline: Timeline, lanes: list[str], shown: tuple[int, int, Span], seconds: float, single: bool
) -> None:
    first, last, (start, end) = shown
    zero = timeline.started if single else start
    axes.set_xlim(start - zero, start - zero + seconds)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=10)
    axes.tick_params(left=False, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    bars = _bars(timeline, (start, end))
    for row, lane in enumerate(lanes):
        axes.barh(row, end - start, left=start - zero, height=0.8, color=IDLE, zorder=1)
        busy = sum(b.span[1] - b.span[0] for b in bars if LANES[b.stage] == lane and b.stage != "evaluate")
        share = f" {min(1.0, busy / (end - start)):.0%} busy"
        axes.text(end - zero, row, share, va="center", ha="left", fontsize=9, color=FRAME)
    for bar in bars:
        row, (left, right) = lanes.index(LANES[bar.stage]), (bar.span[0] - zero, bar.span[1] - zero)
        axes.barh(row, right - left, left=left, height=0.8, zorder=2, **_look(bar.stage, bar.discarded))
        _label(axes, (left, right), row, bar.labels, FRAME if bar.discarded else INK.get(bar.stage, "white"))
    _follow(axes, timeline, lanes, (first + last) // 2, zero)


def _look(stage: str, discarded: bool = False) -> dict[str, Any]:
    if stage == "evaluate":
        return {"facecolor": COLOURS[stage], "edgecolor": "#CC79A7", "linewidth": 0.6, "hatch": "////"}
    if discarded:
        return {"facecolor": "white", "edgecolor": COLOURS[stage], "linewidth": 1.2}
    return {"facecolor": COLOURS[stage], "edgecolor": "white", "linewidth": 0.0 if stage == "load" else 0.6}


def _follow(axes: Any, timeline: Timeline, lanes: list[str], batch: int, zero: float) -> None:
    """Outline one batch from its generation to its training, and join its bars with arrows."""
    spans = timeline.steps[batch - 1].spans
    stages = [stage for stage in ("generate", "reference", "train") if stage in spans]
    for row, stage in enumerate(stages):
        start, end = spans[stage]
        axes.barh(
            row, end - start, left=start - zero, height=0.8, zorder=4, facecolor="none", edgecolor="black", lw=1.6
        )
        if row:
            before = spans[stages[row - 1]][1]
            arrow = {"arrowstyle": "-|>", "lw": 1.2, "color": "black", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
            tip, tail = (start - zero, row - 0.4), (before - zero, row - 0.6)
            axes.annotate("", xy=tip, xytext=tail, arrowprops=arrow, zorder=5)


def _label(axes: Any, span: Span, row: int, labels: list[str], colour: str) -> None:
    """The longest of the labels that fits its bar, or none."""
    renderer = axes.figure.canvas.get_renderer()
    left, right = (axes.transData.transform((x, 0))[0] for x in span)
    for label in labels:
        text = axes.text(sum(span) / 2, row, label, ha="center", va="center", fontsize=8, color=colour, zorder=3)
        if text.get_window_extent(renderer).width < right - left - 4:
            return
        text.remove()


def _title(axes: Any, name: str, timeline: Timeline, shown: tuple[int, int, Span]) -> None:
    first, last, (start, end) = shown
    what = timeline.mode if name in ("", timeline.mode) else f"{name} ({timeline.mode})"
    share = timeline.overlap_fraction
    overlap = "" if share is None else f": a later batch is generated during {share:.0%} of training steps"
    axes.set_title(f"{what}, lag {timeline.lag}{overlap}", loc="left", fontsize=12, fontweight="bold", color=FRAME)
    rate = f"steps {first} to {last} in {end - start:.2f} s"
    axes.set_title(rate, loc="right", fontsize=10, color=FRAME)


def _legend(figure: Any, timelines: Mapping[str, Timeline], windows: Mapping[str, tuple[int, int, Span]]) -> None:
    """Only what can be seen in some panel, and what the shade between the bars means."""
    from matplotlib.patches import Patch

    bars = [bar for name, timeline in timelines.items() for bar in _bars(timeline, windows[name][2])]
    handles = []
    for stage, text in LEGEND.items():
        if any(bar.stage == stage for bar in bars):
            handles.append(Patch(label=text, **_look(stage)))
    if any(bar.discarded for bar in bars):
        handles.append(Patch(label="judged, then discarded", **_look("train", discarded=True)))
    handles.append(Patch(facecolor="none", edgecolor="black", linewidth=1.6, label="one batch, followed"))
    handles.append(Patch(facecolor=IDLE, label="idle"))
    columns = len(handles) if len(handles) < 8 else 4
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 1.2, "columnspacing": 1.4}
    figure.legend(handles=handles, loc="lower center", ncols=columns, **look)
