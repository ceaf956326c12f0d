"""Spans made by hand, with an overlap that is known."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaprl_ray.runs.gantt import figure_of, window
from overlaprl_ray.runs.timeline import EvaluationSpan, StepSpans, Timeline, load_trace, overlap_fraction, write_trace


def serial(count, start=1000.0):
    """One stage after another: generate 1 s, reference 0.5 s, train 1 s."""
    spans = []
    for k in range(count):
        t = start + 2.5 * k
        spans.append(
            {"load": (t, t), "generate": (t, t + 1), "reference": (t + 1, t + 1.5), "train": (t + 1.5, t + 2.5)}
        )
    return spans


def ahead(count, start=1000.0):
    """Batch k+1 is generated during the first 0.8 s of the training of batch k, which lasts 1 s."""
    spans = []
    for k in range(count):
        t = start + k
        spans.append(
            {"load": (t - 1, t - 0.99), "generate": (t - 0.99, t - 0.2), "reference": (t - 0.2, t), "train": (t, t + 1)}
        )
    return spans


def timeline(spans, mode="overlap", lag=1, decisions=None, **more):
    decisions = decisions or ["fresh"] * len(spans)
    steps, version = [], 0
    for k, (span, decision) in enumerate(zip(spans, decisions, strict=True), start=1):
        version += decision != "discard"
        steps.append(StepSpans(k, max(0, k - 1 - lag), version, decision, span))
    return Timeline(mode, lag, seed=3, warm_up=5, started=999.0, steps=steps, **more)


def test_serial_steps_do_not_overlap():
    assert overlap_fraction(serial(20), warm_up=5) == 0.0


def test_generation_ahead_overlaps_every_step():
    assert overlap_fraction(ahead(20), warm_up=5) == 1.0


def test_fraction_counts_steps_after_warm_up_that_have_a_successor():
    spans = ahead(15)
    for k in (6, 9):  # batches 7 and 10 are generated too late: after the training of steps 6 and 9
        spans[k] = {**spans[k], "generate": (spans[k - 1]["train"][1], spans[k - 1]["train"][1] + 0.1)}
    assert overlap_fraction(spans, warm_up=5) == pytest.approx(7 / 9)  # steps 6 to 14 are counted


def test_warm_up_is_left_out():
    assert overlap_fraction(serial(5) + ahead(10, start=1020.0), warm_up=5) == 1.0


def test_touching_spans_do_not_overlap():
    spans = [{"generate": (0.0, 1.0), "train": (1.0, 2.0)}, {"generate": (2.0, 3.0), "train": (3.0, 4.0)}]
    assert overlap_fraction(spans, warm_up=0) == 0.0


def test_a_batch_further_ahead_counts():
    spans = [
        {"generate": (0.0, 1.0), "train": (4.0, 5.0)},
        {"generate": (1.0, 2.0), "train": (5.0, 6.0)},  # done before step 1 begins to train
        {"generate": (4.2, 4.8), "train": (6.0, 7.0)},
    ]
    assert overlap_fraction(spans, warm_up=0) == 0.5


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_steps_have_no_fraction(count):
    assert overlap_fraction(ahead(count), warm_up=5) is None


@given(st.lists(st.floats(0.01, 2.0), min_size=2, max_size=12), st.integers(0, 8))
def test_one_actor_at_a_time_never_overlaps(lengths, warm_up):
    clock, spans = 0.0, []
    for length in lengths:
        spans.append({"generate": (clock, clock + length), "train": (clock + length, clock + 2 * length)})
        clock += 2 * length
    assert overlap_fraction(spans, warm_up) == 0.0


def test_trace_round_trip(tmp_path):
    decisions = ["fresh", "stale", "discard", *["fresh"] * 5]
    evaluations = [EvaluationSpan(0, 0, (999.1, 999.2)), EvaluationSpan(4, 3, (1003.81, 1003.9))]
    made = timeline(ahead(8, start=1001.0), decisions=decisions, evaluations=evaluations)
    write_trace(tmp_path / "t.json", made)
    read = load_trace(tmp_path / "t.json")
    assert (read.mode, read.lag, read.seed, read.warm_up, read.started) == ("overlap", 1, 3, 5, 999.0)
    for a, b in zip(made.steps, read.steps, strict=True):
        assert (a.step, a.weights_step, a.version, a.decision) == (b.step, b.weights_step, b.version, b.decision)
        assert a.spans.keys() == b.spans.keys()
        for stage, span in a.spans.items():
            assert b.spans[stage] == pytest.approx(span, abs=1e-6)
    for a, b in zip(made.evaluations, read.evaluations, strict=True):
        assert (a.step, a.version) == (b.step, b.version)
        assert b.span == pytest.approx(a.span, abs=1e-6)
    assert read.overlap_fraction == made.overlap_fraction


def test_trace_is_what_viewers_expect(tmp_path):
    write_trace(tmp_path / "t.json", timeline(ahead(8, start=1001.0), decisions=["fresh", "discard", *["fresh"] * 6]))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(names) == ["generator", "reference", "learner"]
    train = next(e for e in events if e["name"] == "train 4")
    assert train["tid"] == names["learner"]
    assert train["ph"] == "X"
    assert train["ts"] == pytest.approx((1004.0 - 999.0) * 1e6)
    assert train["dur"] == pytest.approx(1e6)
    # step 2 was discarded, so the weights after it are still version 1
    assert train["args"] == {"batch": 4, "weights_step": 2, "decision": "fresh", "version": 3, "weights_version": 1}


def test_bars_that_overlap_in_a_lane_get_threads_of_their_own(tmp_path):
    spans = [{"load": (t, t), "generate": (t, t + 1.5), "train": (t + 1.5, t + 2.4)} for t in (1000.0, 1001.0, 1002.0)]
    write_trace(tmp_path / "t.json", timeline(spans))  # two generators: batches overlap
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for tid in {e["tid"] for e in events}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(a[1] <= b[0] + 0.5 for a, b in pairwise(row))


def test_window_is_a_dozen_steps_after_warm_up():
    first, last, (start, end) = window(timeline(serial(40)))
    assert (first, last) == (6, 17)
    assert end - start == pytest.approx(12 * 2.5)  # from the end of step 5 to the end of step 17


@pytest.mark.parametrize(("count", "expected"), [(3, (1, 3)), (12, (1, 12)), (14, (3, 14)), (17, (6, 17))])
def test_window_of_a_short_run(count, expected):
    assert window(timeline(serial(count)))[:2] == expected


def test_window_of_a_resumed_run_has_its_own_step_numbers():
    resumed = timeline(serial(20))
    resumed = replace(resumed, steps=resumed.steps[4:])
    assert window(resumed)[:2] == (9, 20)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="without steps"):
        figure_of({"overlap": timeline([])})


@pytest.mark.parametrize("reference", [True, False])
def test_pictures(tmp_path, reference):
    spans = ahead(20)
    if not reference:
        spans = [{stage: span for stage, span in s.items() if stage != "reference"} for s in spans]
    decisions = ["fresh"] * 8 + ["stale", "discard"] + ["fresh"] * 10
    one = timeline(spans, decisions=decisions, evaluations=[EvaluationSpan(10, 9, (1010.81, 1010.99))])
    figure_of({"overlap": one}).savefig(tmp_path / "one.png")
    figure_of({"sync": timeline(serial(20), "sync", 0), "overlap": one}).savefig(tmp_path / "two.png")
    from matplotlib.image import imread

    single, double = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert single.shape[1] == double.shape[1] > 1500
    assert double.shape[0] > single.shape[0] > 200
    for picture in (single, double):  # green bars of the learner: the picture is not empty
        green = (abs(picture[:, :, :3] - [0, 0x9E / 255, 0x73 / 255]) < 0.02).all(-1)
        assert green.mean() > 0.02
