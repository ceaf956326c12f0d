"""Spans made by hand, with an overlap that is known."""

from itertools import pairwise

import pytest
from conftest import small
from hypothesis import given
from hypothesis import strategies as st

from overlaprl_ray.runs.gantt import figure_of, window
from overlaprl_ray.runs.timeline import overlap_fraction, spans_of, trace_of
from overlaprl_ray.workers.results import Evaluation, StepResult


def serial(count, start=1000.0):
    """One stage after another: generate 1 s, reference 0.5 s, train 1 s."""
    times = [start + 2.5 * k for k in range(count)]
    return [
        {"load": (t, t), "generate": (t, t + 1), "reference": (t + 1, t + 1.5), "train": (t + 1.5, t + 2.5)}
        for t in times
    ]


def ahead(count, start=1000.0):
    """Batch k+1 is generated during the first 0.8 s of the training of batch k, which lasts 1 s."""
    times = [start + k for k in range(count)]
    return [
        {"load": (t - 1, t - 0.99), "generate": (t - 0.99, t - 0.2), "reference": (t - 0.2, t), "train": (t, t + 1)}
        for t in times
    ]


def trace(spans, mode="overlap", decisions=None, evaluations=(), first=1):
    """A run's trace; its clock starts at 999 s."""
    lag, version, steps = 0 if mode == "sync" else 1, 0, []
    for k, span in enumerate(spans, start=first):
        decision = decisions[k - first] if decisions else "fresh"
        version += decision != "discard"
        metrics = {"version": version, "staleness/decision": decision}
        steps.append(StepResult(k, metrics, span, {}, [], max(0, k - 1 - lag), [], None, None))
    return trace_of(small(pipeline={"mode": mode, "lag": lag}, seed=3), 999.0, steps, evaluations)


def late(count, batches):
    """Generated ahead, but for these batches: after the training of the step before."""
    spans = ahead(count)
    for k in batches:
        end = spans[k - 2]["train"][1]
        spans[k - 1] = {**spans[k - 1], "generate": (end, end + 0.1)}
    return spans


FURTHER_AHEAD = [
    {"generate": (0.0, 1.0), "train": (4.0, 5.0)},
    {"generate": (1.0, 2.0), "train": (5.0, 6.0)},  # done before step 1 begins to train
    {"generate": (4.2, 4.8), "train": (6.0, 7.0)},
]
TOUCHING = [{"generate": (0.0, 1.0), "train": (1.0, 2.0)}, {"generate": (2.0, 3.0), "train": (3.0, 4.0)}]


@pytest.mark.parametrize(
    ("spans", "warm_up", "expected"),
    [
        (serial(20), 5, 0.0),
        (ahead(20), 5, 1.0),
        (late(15, [7, 10]), 5, 7 / 9),  # steps 6 to 14 are counted
        (serial(5) + ahead(10, start=1020.0), 5, 1.0),  # warm-up is left out
        (TOUCHING, 0, 0.0),
        (FURTHER_AHEAD, 0, 0.5),
        (ahead(0), 5, None),
        (ahead(1), 5, None),
    ],
)
def test_overlap_fraction(spans, warm_up, expected):
    assert overlap_fraction(spans, warm_up) == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.floats(0.01, 2.0), min_size=2, max_size=12), st.integers(0, 8))
def test_one_actor_at_a_time_never_overlaps(lengths, warm_up):
    clock, spans = 0.0, []
    for length in lengths:
        spans.append({"generate": (clock, clock + length), "train": (clock + length, clock + 2 * length)})
        clock += 2 * length
    assert overlap_fraction(spans, warm_up) == 0.0


def test_a_trace_is_what_viewers_expect_and_holds_every_span():
    spans = ahead(8, start=1001.0)
    made = trace(spans, decisions=["fresh", "discard", *["fresh"] * 6])
    for (step, stages), original in zip(spans_of(made).items(), spans, strict=True):
        assert stages.keys() == original.keys(), step
        for stage, (start, end) in original.items():
            assert stages[stage] == pytest.approx((start - 999.0, end - 999.0), abs=1e-6)
    events = made["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(names) == ["generator", "reference", "learner"]
    train = next(e for e in events if e["name"] == "train 4")
    assert (train["tid"], train["ph"]) == (names["learner"], "X")
    assert (train["ts"], train["dur"]) == pytest.approx((5e6, 1e6))
    # step 2 was discarded, so the weights after it are still version 1
    assert train["args"] == {"batch": 4, "weights_step": 2, "decision": "fresh", "version": 3, "weights_version": 1}


def test_bars_that_overlap_in_a_lane_get_threads_of_their_own():
    spans = [{"load": (t, t), "generate": (t, t + 1.5), "train": (t + 1.5, t + 2.4)} for t in (1000.0, 1001.0, 1002.0)]
    events = [e for e in trace(spans)["traceEvents"] if e["ph"] == "X"]  # two generators: batches overlap
    for tid in {e["tid"] for e in events}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(a[1] <= b[0] + 0.5 for a, b in pairwise(row))


@pytest.mark.parametrize(
    ("count", "first", "expected"),
    [(3, 1, (1, 3)), (12, 1, (1, 12)), (14, 1, (3, 14)), (17, 1, (6, 17)), (40, 1, (6, 17)), (16, 5, (9, 20))],
)
def test_the_window_is_a_dozen_steps_after_warm_up(count, first, expected):
    *steps, (start, end) = window(trace(serial(count), first=first))
    assert tuple(steps) == expected
    if count > 12:
        assert end - start == pytest.approx(12 * 2.5)  # from the end of the step before


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="without steps"):
        figure_of({"overlap": trace([])})


@pytest.mark.parametrize("reference", [True, False])
def test_pictures(tmp_path, reference):
    from matplotlib.image import imread

    spans = [{stage: span for stage, span in s.items() if reference or stage != "reference"} for s in ahead(20)]
    decisions = ["fresh"] * 8 + ["stale", "discard"] + ["fresh"] * 10
    one = trace(spans, decisions=decisions, evaluations=[Evaluation(10, 9, 0.5, 16, (1010.81, 1010.99))])
    figure_of({"overlap": one}).savefig(tmp_path / "one.png")
    del one["otherData"]["overlap_fraction"]  # as in traces of older versions
    figure_of({"sync": trace(serial(20), "sync"), "overlap": one}).savefig(tmp_path / "two.png")
    single, double = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert single.shape[1] == double.shape[1] > 1500
    assert double.shape[0] > single.shape[0] > 200
    for picture in (single, double):  # green bars of the learner: the picture is not empty
        green = (abs(picture[:, :, :3] - [0, 0x9E / 255, 0x73 / 255]) < 0.02).all(-1)
        assert green.mean() > 0.02
