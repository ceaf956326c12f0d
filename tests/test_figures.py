"""Figures: what they show against plain Python, what they say when there is nothing, and that people can read them."""

import io
import json
import random
import shutil
import statistics as plain
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from scipy import stats
from study import modes, write_run, write_sweep

from overlaprl_ray.reports import figures, staleness_figures
from overlaprl_ray.reports.budgets import curves
from overlaprl_ray.reports.comparison import compare_sweeps
from overlaprl_ray.reports.figures import band, by_setting, learning_curves, looks, pareto_front
from overlaprl_ray.reports.loading import load, load_or_explain
from overlaprl_ray.reports.timelines import gantt

COMMITTED = Path(__file__).parent.parent / "analysis" / "results"
ALL = {
    "curves": learning_curves,
    "accuracy": lambda r: learning_curves(r, "accuracy", "seconds"),
    "tokens": lambda r: learning_curves(r, "loss", "tokens"),
    "throughput": figures.throughput,
    "gantt": gantt,
    "thresholds": staleness_figures.threshold_map,
    "decisions": staleness_figures.decisions_over_time,
    "kl": staleness_figures.kl_against_lag,
    "discarded": staleness_figures.who_gets_discarded,
}
DRAWN_FROM = {"thresholds": "thresholds"}  # the others from the studies


@pytest.fixture(scope="module")
def committed():
    return {name: load(COMMITTED / name) for name in ("study", "rules", "thresholds")}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name in ALL if name != "gantt"])
@pytest.mark.parametrize("study", ["study", "rules"])  # short labels of few settings, long ones of many
def test_figures_of_the_committed_results(committed, study, name):
    figure = ALL[name](committed[DRAWN_FROM.get(name, study)])
    assert figure.get_label() != figures.NOTE
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pixels = matplotlib.image.imread(io.BytesIO(buffer.getvalue()))[..., :3]
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    for axes in figure.axes:
        if axes.get_visible() and name not in ("discarded", "decisions"):
            assert axes.get_xlabel()
            assert axes.get_ylabel()
    assert not overlapping_texts(figure)


def overlapping_texts(figure):
    """Pairs of titles, labels and legend entries that lie on one another."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        if axes.get_visible():
            texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
            (left, right), (low, high) = axes.get_xlim(), sorted(axes.get_ylim())
            texts += [t for x, t in zip(axes.get_xticks(), axes.get_xticklabels(), strict=False) if left <= x <= right]
            texts += [t for y, t in zip(axes.get_yticks(), axes.get_yticklabels(), strict=False) if low <= y <= high]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text().strip()]
    return [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[i + 1 :] if x.overlaps(y)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(ALL))
def test_nothing_to_draw_is_said(name, tmp_path):
    figure = ALL[name](load_or_explain(tmp_path))
    assert figure.get_label() == figures.NOTE
    assert len(figure.texts[0].get_text()) > 20


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(ALL))
def test_one_short_run_is_drawn_or_said(name, tmp_path):
    for steps, status in ((1, "done"), (2, None)):
        ALL[name](load(write_run(tmp_path / str(steps), random.Random(0), steps=steps, status=status)))


# ---- numbers ----


def test_band_is_the_t_interval_over_what_all_seeds_cover():
    x = np.array([0.0, 1.0, 2.0, 4.0])
    seeds = [(x, np.array(y)) for y in ([0, 1, 2, 3], [1, 1, 4, 3], [2, 1, 0, 9])]
    seeds.append((np.array([-1.0, 9.0]), np.array([0.0, 10.0])))
    grid, mean, half = band(seeds, points=5)
    assert grid.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    values = [[0, 1, 2, 1], [1, 1, 1, 2], [2, 4, 0, 3], [2.5, 3.5, 4.5, 4], [3, 3, 9, 5]]
    assert mean.tolist() == pytest.approx([plain.fmean(column) for column in values])
    expected = [stats.t.ppf(0.975, 3) * plain.stdev(column) / 2 for column in values]
    assert half.tolist() == pytest.approx(expected)


def test_one_seed_has_no_band(tmp_path):
    assert band([(np.array([1.0]), np.array([2.0]))])[2] is None
    results = load(write_run(tmp_path / "run", random.Random(0)))
    axes = learning_curves(results).axes[0]
    assert len(axes.collections) == 0
    assert axes.get_title() == "One seed each: no interval"
    sweep = load(write_sweep(tmp_path / "sweep", random.Random(0), modes(1), seeds=2))
    assert len(learning_curves(sweep).axes[0].collections) == 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_pareto_front(points):
    beaten = {p for p in points for q in points if q[0] >= p[0] and q[1] >= p[1] and q != p}
    assert pareto_front(points) == sorted(set(points) - beaten)


def test_curves_only_of_finished_runs_where_there_are_some(tmp_path):
    write_sweep(tmp_path, random.Random(0), modes(1), seeds=2)
    write_run(tmp_path / "trials" / "dead", random.Random(0), steps=3, status="failed", pipeline__mode="sync", seed=9)
    results = load(tmp_path)
    found = by_setting(results, curves(results, "reward"))
    assert {label: len(seeds) for label, seeds in found.items()} == dict.fromkeys(found, 2)
    only = load(tmp_path / "trials" / "dead")
    assert list(by_setting(only, curves(only, "reward"))) == ["all runs"]


def test_heat_map_holds_the_means(tmp_path):
    values = [{"staleness__kl_fresh": f, "staleness__kl_stale": s} for f, s in ((0.01, 0.1), (0.01, 0.3), (0.2, 0.3))]
    results = load(write_sweep(tmp_path, random.Random(0), values, seeds=3))
    figure = staleness_figures.threshold_map(results)
    trials = results.trials
    for axes, column in zip(figure.axes, (trials["reward_last_10"], trials["decisions.discard"] / 24), strict=True):
        shown = axes.images[0].get_array()
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.2"]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0.1", "0.3"]
        for (fresh, stale), (x, y) in {(0.01, 0.1): (0, 0), (0.01, 0.3): (0, 1), (0.2, 0.3): (1, 1)}.items():
            cell = column[(trials["staleness.kl_fresh"] == fresh) & (trials["staleness.kl_stale"] == stale)]
            assert shown[y, x] == pytest.approx(cell.mean())
        assert np.ma.is_masked(shown[0, 1]) or np.isnan(shown[0, 1])  # kl_fresh above kl_stale: was not run
        assert len(axes.texts) == 3
    assert "n 3" in figure.axes[0].get_title()


def test_who_gets_discarded_counts_rows(tmp_path):
    write_sweep(tmp_path, random.Random(0), [{"pipeline__mode": "overlap"}, {"pipeline__mode": "sync"}], seeds=2)
    results = load(tmp_path)
    figure = staleness_figures.who_gets_discarded(results)
    judged = [f for f in (tmp_path / "trials").iterdir() if "mode: overlap" in (f / "config.yaml").read_text()]
    counts = {}
    for folder in judged:  # sync judges nothing and is left out
        for line in (folder / "decisions.jsonl").read_text().splitlines():
            for cell in json.loads(line)["cells"]:
                counts[cell[0], cell[3]] = counts.get((cell[0], cell[3]), 0) + cell[4]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    totals = [sum(counts.get((b, d), 0) for d in ("fresh", "stale", "discard")) for b in range(4)]
    expected = [counts.get((b, d), 0) / totals[b] for d in ("fresh", "stale", "discard") for b in range(4)]
    assert widths == pytest.approx(expected)
    assert [text.get_text() for text in figure.axes[0].texts] == [f"{total:,}" for total in totals]


def test_gantt_shows_a_run_of_each_mode(tmp_path):
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": stage, "ts": 1e6 * (3 * k + i), "dur": 9e5,
             "args": {"batch": k, "weights_step": k - 1, "version": k, "decision": "fresh"}}
            for k in range(1, 9) for i, stage in enumerate(("load", "generate", "train"))
        ],
        "otherData": {"mode": "sync", "lag": 0, "seed": 0, "warm_up": 2, "started": 0.0, "overlap_fraction": 0.5},
    }  # fmt: skip
    for mode in ("sync", "async"):
        folder = write_run(tmp_path / mode, random.Random(0), pipeline__mode=mode)
        (folder / "timeline.json").write_text(json.dumps(trace))
    broken = write_run(tmp_path / "overlap", random.Random(0), pipeline__mode="overlap")
    (broken / "timeline.json").write_text('{"traceEvents": [')
    assert len(gantt(load(tmp_path)).axes) == 2
    shutil.rmtree(tmp_path / "sync")
    shutil.rmtree(tmp_path / "async")
    assert gantt(load(tmp_path)).get_label() == figures.NOTE


def test_differences_of_two_sweeps(tmp_path):
    first = load(write_sweep(tmp_path / "a", random.Random(0), modes(1), seeds=3))
    second = load(write_sweep(tmp_path / "b", random.Random(1), modes(1), seeds=3))
    table = compare_sweeps(first, second)
    axes = figures.pairs(table, "a", "b").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(table["setting"])
    assert axes.lines[0].get_xdata().tolist() == pytest.approx(table["difference"].tolist())


# ---- for the eye ----


def test_a_mode_has_one_colour_everywhere(committed):
    for results in committed.values():
        for label, look in looks(results).items():
            mode = next((mode for mode in figures.COLOURS if f"mode {mode}" in label), None)
            if mode:
                assert look["color"] == figures.COLOURS[mode]
    rules = looks(committed["rules"])
    assert len({tuple(look.values()) for look in rules.values()}) == len(rules)


# Machado, Oliveira and Fernandes (2009), severity 1: what people without one kind of cone see, in linear RGB.
SIGHT = {
    name: np.array(matrix).reshape(3, 3)
    for name, matrix in {
        "all cones": [1, 0, 0, 0, 1, 0, 0, 0, 1],
        "protanopia": [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
        "deuteranopia": [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
        "tritanopia": [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
    }.items()
}


def lab(colour, sight):
    """CIE L*a*b* of a colour as seen."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(SIGHT[sight] @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / np.array([0.9505, 1.0, 1.089]), 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", list(SIGHT))
@pytest.mark.parametrize("colours", [figures.COLOURS, staleness_figures.COLOURS])
def test_colours_are_told_apart_by_all_eyes(sight, colours):
    seen = [lab(colour, sight) for colour in colours.values()]
    distances = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[i + 1 :]]
    assert min(distances) > 15  # about 2 is just noticeable
