"""When each actor did what: the overlap as a number, and a trace file. gantt.py draws the picture.

The trace has Chrome's format: open a run's timeline.json in https://ui.perfetto.dev, or read it back here.

    load_trace("runs/demo/timeline.json").overlap_fraction
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlaprl_ray.rollout import Span
from overlaprl_ray.runs.files import replace_text

LANES = {"load": "generator", "generate": "generator", "evaluate": "generator", "reference": "reference",
         "train": "learner", "publish": "learner"}  # fmt: skip


@dataclass(frozen=True)
class StepSpans:
    """One step: its batch was generated with the weights after `weights_step`; `version` is the one after the step."""

    step: int
    weights_step: int
    version: int
    decision: str  # fresh | stale | discard
    spans: Mapping[str, Span]  # load, generate, train, and reference where there is one


@dataclass(frozen=True)
class EvaluationSpan:
    """A held-out evaluation of the policy after a step, between two batches of the generator."""

    step: int
    version: int
    span: Span


@dataclass(frozen=True)
class Timeline:
    """A run's spans, and what identifies the run."""

    mode: str
    lag: int
    seed: int
    warm_up: int  # steps left out of figures
    started: float  # the run's zero, seconds
    steps: Sequence[StepSpans]
    evaluations: Sequence[EvaluationSpan] = ()

    @property
    def overlap_fraction(self) -> float | None:
        """See `overlap_fraction`."""
        return overlap_fraction([step.spans for step in self.steps], self.warm_up)


def overlap_fraction(spans: Sequence[Mapping[str, Span]], warm_up: int) -> float | None:
    """Share of the steps after warm-up during whose training a later batch is being generated; None below two steps.

    `spans[k]` belongs to step k+1. The last step has no later batch and is not counted; a run no longer than the
    warm-up is counted whole.
    """
    steady = spans[warm_up:] if len(spans) > warm_up + 1 else spans
    if len(steady) < 2:
        return None
    return sum(_overlapped(steady, k) for k in range(len(steady) - 1)) / (len(steady) - 1)


def _overlapped(spans: Sequence[Mapping[str, Span]], k: int) -> bool:
    start, end = spans[k]["train"]
    for later in range(k + 1, len(spans)):
        begin, finish = spans[later]["generate"]
        if begin >= end:
            return False  # batches are generated in order
        if finish > start:
            return True
    return False


# ---- Chrome trace ----


def write_trace(path: str | Path, timeline: Timeline) -> None:
    """Every span as a complete event, in microseconds from the run's start."""
    version_after = {0: 0, **{step.step: step.version for step in timeline.steps}}
    events = []
    for step in timeline.steps:
        args = {"batch": step.step, "weights_step": step.weights_step, "decision": step.decision,
                "version": step.version, "weights_version": version_after.get(step.weights_step)}  # fmt: skip
        events += [_event(stage, f"{stage} {step.step}", span, timeline, args) for stage, span in step.spans.items()]
    for done in timeline.evaluations:
        args = {"step": done.step, "version": done.version}
        events.append(_event("evaluate", f"evaluate w{done.step}", done.span, timeline, args))
    about = {"mode": timeline.mode, "lag": timeline.lag, "seed": timeline.seed, "warm_up": timeline.warm_up,
             "started": timeline.started, "overlap_fraction": timeline.overlap_fraction}  # fmt: skip
    names = _assign_threads(events, f"{timeline.mode}, lag {timeline.lag}, seed {timeline.seed}")
    trace = {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about}
    replace_text(Path(path), json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n")


def _event(stage: str, name: str, span: Span, timeline: Timeline, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round((span[0] - timeline.started) * 1e6, 1), "dur": round((span[1] - span[0]) * 1e6, 1)}
    return {"name": name, "cat": stage, "ph": "X", "pid": 1, **times, "args": args}


def _assign_threads(events: list[dict[str, Any]], process: str) -> list[dict[str, Any]]:
    """Give every event a thread (`tid`); returns the events that name the threads.

    A lane has as many threads as it needs for no two of its bars to overlap in one (several generators share a lane):
    viewers drop bars that do.
    """
    names: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": process}}]
    for number, lane in enumerate(dict.fromkeys(LANES.values()), 1):
        ends: list[float] = []  # of each thread's last bar
        for event in sorted((e for e in events if LANES[e["cat"]] == lane), key=lambda e: e["ts"]):
            thread = next((i for i, end in enumerate(ends) if end <= event["ts"] + 0.2), len(ends))  # 0.2: rounding
            event["tid"] = 100 * number + thread
            if thread == len(ends):
                ends.append(0.0)
                head = {"ph": "M", "pid": 1, "tid": event["tid"]}
                name = lane if thread == 0 else f"{lane} ({thread + 1})"
                names.append({**head, "name": "thread_name", "args": {"name": name}})
                names.append({**head, "name": "thread_sort_index", "args": {"sort_index": event["tid"]}})
            ends[thread] = event["ts"] + event["dur"]
    return names


def load_trace(path: str | Path) -> Timeline:
    """Read back what `write_trace` wrote, to within a microsecond."""
    trace = json.loads(Path(path).read_text(encoding="utf-8"))
    about = trace["otherData"]
    batches: dict[int, dict[str, Any]] = {}
    spans: dict[int, dict[str, Span]] = {}
    evaluations = []
    for event in (event for event in trace["traceEvents"] if event["ph"] == "X"):
        args, start = event["args"], about["started"] + event["ts"] / 1e6
        span = (start, start + event["dur"] / 1e6)
        if event["cat"] == "evaluate":
            evaluations.append(EvaluationSpan(args["step"], args["version"], span))
        else:
            batches[args["batch"]] = args
            spans.setdefault(args["batch"], {})[event["cat"]] = span
    steps = [StepSpans(k, a["weights_step"], a["version"], a["decision"], spans[k]) for k, a in batches.items()]
    head = {name: about[name] for name in ("mode", "lag", "seed", "warm_up", "started")}
    return Timeline(**head, steps=steps, evaluations=evaluations)
