"""When each actor did what: a trace file, and the overlap as a number. gantt.py draws the picture.

A trace has Chrome's format: open a run's timeline.json in https://ui.perfetto.dev, or read it with json.loads.

    spans = spans_of(json.loads(Path("runs/demo/timeline.json").read_text()))
    overlap_fraction(list(spans.values()), warm_up=5)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.rollout import Span
from overlaprl_ray.workers.results import Evaluation, StepResult

WARM_UP = 5  # steps left out of figures and speeds: the first ones allocate, compile kernels and fill the pipeline
LANES = {"load": "generator", "generate": "generator", "evaluate": "generator", "reference": "reference",
         "train": "learner", "publish": "learner"}  # fmt: skip


def overlap_fraction(spans: Sequence[Mapping[str, Span]], warm_up: int = WARM_UP) -> float | None:
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
    later = (span["generate"] for span in spans[k + 1 :])  # in order: batches are generated in order
    return any(finish > start for begin, finish in later if begin < end)


def trace_of(
    config: ExperimentConfig, started: float, steps: Sequence[StepResult], evaluations: Sequence[Evaluation]
) -> dict[str, Any]:
    """Every span as a complete event, in microseconds from `started`, and what identifies the run."""

    def event(stage: str, name: str, span: Span, args: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": round((span[0] - started) * 1e6, 1), "dur": round((span[1] - span[0]) * 1e6, 1)}
        return {"name": name, "cat": stage, "ph": "X", "pid": 1, **times, "args": args}

    events, version_after = [], {0: 0, **{step.step: step.metrics["version"] for step in steps}}
    for step in steps:
        source, decision = step.weights_step, step.metrics["staleness/decision"]
        versions = {"version": version_after[step.step], "weights_version": version_after.get(source)}
        args = {"batch": step.step, "weights_step": source, "decision": decision, **versions}
        events += [event(stage, f"{stage} {step.step}", span, args) for stage, span in step.spans.items()]
    for done in evaluations:
        events.append(
            event("evaluate", f"evaluate w{done.step}", done.span, {"step": done.step, "version": done.version})
        )
    mode, lag, seed = config.pipeline.mode, config.lag, config.seed
    about = {"mode": mode, "lag": lag, "seed": seed, "warm_up": WARM_UP, "started": started,
             "overlap_fraction": overlap_fraction([step.spans for step in steps])}  # fmt: skip
    names = _assign_threads(events, f"{mode}, lag {lag}, seed {seed}")
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about}


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
                name = lane if thread == 0 else f"{lane} ({thread + 1})"
                names.append({"ph": "M", "pid": 1, "tid": event["tid"], "name": "thread_name", "args": {"name": name}})
            ends[thread] = event["ts"] + event["dur"]
    return names


def spans_of(trace: dict[str, Any]) -> dict[int, dict[str, Span]]:
    """Each step's spans by stage, in seconds from the run's start."""
    spans: dict[int, dict[str, Span]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "evaluate":
            span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            spans.setdefault(event["args"]["batch"], {})[event["cat"]] = span
    return spans
