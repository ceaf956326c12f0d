"""A few steps of a run as bars, one lane per actor: who worked when, on which batch, with which weights.

The whole run is in timeline.json, from which this draws.

    figure_of({"sync": json.loads(one.read_text()), "overlap": json.loads(other.read_text())}).savefig("modes.png")
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlaprl_ray.rollout import Span
from overlaprl_ray.runs.timeline import LANES, spans_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 12  # steps in a picture: few enough to follow one batch by eye
WIDTH_IN, LANES_IN, CHARACTER_IN = 13.0, 11.0, 0.072  # inches: figure, lanes, one character of a label

# colour, colour of the text on it, legend; Okabe and Ito's colours, which colour-blind people tell apart
KINDS = {
    "generate": ("#0072B2", "white", "generate (7 ← w5: batch 7, with the weights after step 5)"),
    "load": ("#4D4D4D", "white", "load weights"),
    "publish": ("#8C8C8C", "white", "publish weights"),
    "reference": ("#E69F00", "black", "score with the reference"),
    "train": ("#009E73", "white", "judge and train"),
    "discard": ("#B5E2D5", "black", "judged, then discarded"),
    "evaluate": ("#CC79A7", "black", "held-out evaluation"),
    "idle": ("#E9E9E6", "black", "idle"),
}


def window(trace: dict[str, Any]) -> tuple[int, int, Span]:
    """The dozen steps after warm-up (of a shorter run its last dozen): first, last, and their span of time.

    The span begins where the step before ends. Raises `ValueError` without steps.
    """
    spans = spans_of(trace)
    steps = list(spans)
    if not steps:
        raise ValueError("a timeline without steps cannot be drawn")
    first = min(trace["otherData"]["warm_up"], max(0, len(steps) - WINDOW))
    shown = steps[first : first + WINDOW]
    start = spans[steps[first - 1]]["train"][1] if first else min(span[0] for span in spans[steps[0]].values())
    return shown[0], shown[-1], (start, spans[shown[-1]]["train"][1])


def figure_of(traces: Mapping[str, dict[str, Any]]) -> "Figure":
    """One panel per run, by name, all on the same time scale, so that the faster run is the shorter one."""
    from matplotlib.figure import Figure  # no pyplot: threads would share its state
    from matplotlib.patches import Patch

    windows = [window(trace) for trace in traces.values()]
    longest = max(end - start for _, _, (start, end) in windows)
    figure = Figure(figsize=(WIDTH_IN, 0.8 + 1.7 * len(traces)), dpi=150, layout="constrained")
    panels = figure.subplots(len(traces), squeeze=False)[:, 0]
    seen = {"idle"}
    for axes, (name, trace), (first, last, span) in zip(panels, traces.items(), windows, strict=True):
        seen |= _panel(axes, trace["traceEvents"], span, longest)
        about = trace["otherData"]
        mode, share = about["mode"], about.get("overlap_fraction")  # older traces have none
        overlap = "" if share is None else f": a later batch is generated during {share:.0%} of training steps"
        title = f"{name if name == mode else f'{name} ({mode})'}, lag {about['lag']}{overlap}"
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_title(f"steps {first} to {last} in {span[1] - span[0]:.2f} s", loc="right", fontsize=10)
    axes.set_xlabel("seconds from the start of the first step shown")
    handles = [Patch(color=colour, label=text) for kind, (colour, _, text) in KINDS.items() if kind in seen]
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 1.2, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), **look)
    return figure


def _panel(axes: Any, events: list[dict[str, Any]], view: Span, seconds: float) -> set[str]:
    """Draw what lies within a span of time, on an axis of so many seconds; returns the kinds of bars drawn."""
    start, end = view
    bars = [event for event in events if event["ph"] == "X"]
    used = {LANES[event["cat"]] for event in bars}
    lanes = [lane for lane in dict.fromkeys(LANES.values()) if lane in used]
    axes.barh(lanes, end - start, color=KINDS["idle"][0])
    busy, seen = dict.fromkeys(lanes, 0.0), set()
    for event in bars:
        left, right = event["ts"] / 1e6 - start, (event["ts"] + event["dur"]) / 1e6 - start
        left, right = max(left, 0.0), min(right, end - start)
        if right <= left:
            continue
        lane, (kind, labels) = LANES[event["cat"]], _kind_and_labels(event)
        seen.add(kind)
        busy[lane] += 0.0 if kind == "evaluate" else right - left
        colour, ink, _ = KINDS[kind]
        axes.barh(lane, right - left, left=left, color=colour, edgecolor="white")
        width = (right - left) / seconds * LANES_IN
        label = next((label for label in labels if len(label) * CHARACTER_IN < width), "")
        axes.text((left + right) / 2, lane, label, ha="center", va="center", fontsize=8, color=ink)
    for lane in lanes:
        axes.text(end - start, lane, f" {min(1.0, busy[lane] / (end - start)):.0%} busy", va="center", fontsize=9)
    axes.set_xlim(0, seconds)
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return seen


def _kind_and_labels(event: dict[str, Any]) -> tuple[str, list[str]]:
    """What a bar is, and what may be written on it, from long to short."""
    stage, args = event["cat"], event["args"]
    if stage == "evaluate":
        return stage, [event["name"], f"w{args['step']}"]
    batch = str(args["batch"])
    kind = "discard" if stage == "train" and args["decision"] == "discard" else stage
    longer = {"generate": [f"{batch} ← w{args['weights_step']}"], "discard": [f"{batch} discarded", f"{batch} ×"]}
    return kind, [] if stage in ("load", "publish") else [*longer.get(kind, []), batch]
