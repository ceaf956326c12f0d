"""The report: its script on all kinds of folders, its page in a real browser."""

import contextlib
import io
import json
import random
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from study import modes, write_run, write_sweep

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.reports.cli import parse_report_command
from overlaprl_ray.reports.loading import load, save
from overlaprl_ray.reports.report import TEMPLATE, write_comparison, write_report

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def script(*arguments: object) -> int:
    """The script in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "report.py"), run_name="__main__")
    return ended.value.code


class Page(HTMLParser):
    """What a page holds: tags, addresses, tables' cells."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.addresses, self.tables, self.open = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Four modes, two lags, three seeds, a timeline, a failed run."""
    folder = write_sweep(tmp_path_factory.mktemp("sweeps") / "first", random.Random(0), modes(1, 8), seeds=3)
    dead = write_run(
        folder / "trials" / "dead", random.Random(1), steps=3, status="failed", pipeline__mode="sync", seed=9
    )
    (dead / "error.txt").write_text("the <generator> & its actor died")
    return folder


@pytest.fixture(scope="module")
def report(sweep, tmp_path_factory):
    """The script's run on the sweep: what it printed and its folder."""
    out = tmp_path_factory.mktemp("report")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as complained:
        assert script(sweep, "--out", out) == 0
    assert complained.getvalue() == ""
    return printed.getvalue(), out


def test_script_prints_the_table_and_writes_all(report):
    printed, out = report
    assert "overlap" in printed
    assert f"page: {out / 'report.html'}" in printed
    names = ("summary", "compare-reward", "compare-accuracy", "ranking-reward", "ranking-accuracy", "runs")
    written = {path.name for path in (out / "tables").iterdir()}
    assert written == {f"{name}.{suffix}" for name in names for suffix in ("csv", "md", "tex")}
    figures = {path.stem for path in (out / "figures").iterdir()}
    assert figures >= {"reward-steps", "reward-seconds", "accuracy-steps", "throughput", "kl-lag", "decisions"}
    rows = pd.read_csv(out / "tables" / "compare-reward.csv")
    assert list(rows["budget"].unique()) == ["steps", "tokens", "seconds"]
    assert len(rows) == 3 * 6
    assert len(pd.read_csv(out / "tables" / "runs.csv")) == 22


def test_page_stands_by_itself(report):
    _, out = report
    page = Page(out / "report.html")
    assert all(address.startswith("data:") for address in page.addresses)
    assert "script" not in page.tags
    text = (out / "report.html").read_text()
    assert "url(" not in text
    assert re.search(r"https?://", re.sub(r'src="data:[^"]*"', "", text)) is None
    assert "the &lt;generator&gt; &amp; its actor died" in text
    assert page.tags.count("img") == len(list((out / "figures").iterdir()))
    summary, *others = page.tables
    modes_of = ["sync", *("async", "staleness", "overlap") * 2]
    assert sorted(row[0] for row in summary) == sorted(["mode", *modes_of])
    assert [len(rows) for rows in others] == [1 + 18, 1 + 7, 1 + 18, 1 + 7, 1 + 22]


PROBE = """<script>addEventListener("load", () => parent.postMessage(JSON.stringify({
    wide: document.documentElement.scrollWidth, view: innerWidth,
    images: [...document.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width]),
    tables: [...document.querySelectorAll("table")].map(t => [t.rows.length, t.getBoundingClientRect().height]),
    requests: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"))
}), "*"))</script></body>"""
FRAME = """<title></title><script>onmessage = e => document.title = e.data</script>
<iframe src="copy.html" style="border:0;width:{width}px;height:900px"></iframe>"""  # windows are 500 px wide at least


@pytest.fixture(scope="module")
def browse(report, tmp_path_factory):
    """(standard output, messages) of headless Chromium on a file beside a copy of the page that looks at itself."""
    if CHROMIUM is None:
        pytest.skip("Chromium (Debian package chromium) is not installed")
    folder = tmp_path_factory.mktemp("browser")
    text = (report[1] / "report.html").read_text()
    (folder / "report.html").write_text(text)
    (folder / "copy.html").write_text(re.sub(r'content="default-src[^"]*"', "", text).replace("</body>", PROBE))

    def run(name: str, content: str | None, *options: str) -> tuple[str, str]:
        if content is not None:
            (folder / name).write_text(content)
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *options]  # fmt: skip
        ran = subprocess.run([*command, (folder / name).as_uri()], capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0
        return ran.stdout, ran.stderr

    return run


@pytest.mark.parametrize("width", [1280, 400])
def test_page_in_a_browser(report, browse, width):
    """All tables and figures are drawn, nothing is wider than the screen, nothing is fetched, nothing complains."""
    shown, log = browse("frame.html", FRAME.format(width=width), "--dump-dom", "--virtual-time-budget=20000")
    found = json.loads(re.search(r"<title>(.*?)</title>", shown)[1].replace("&quot;", '"').replace("&amp;", "&"))
    page = Page(report[1] / "report.html")
    assert found["requests"] == []
    assert found["view"] == width
    assert found["wide"] <= width  # what is wider scrolls in its own box
    assert len(found["images"]) == page.tags.count("img")
    assert all(complete and natural > 300 and shown > 250 for complete, natural, shown in found["images"])
    assert [rows for rows, _ in found["tables"]] == [len(rows) for rows in page.tables]
    assert all(height > 30 for _, height in found["tables"])
    assert "CONSOLE" not in log


def test_page_as_it_is_in_a_browser(browse, tmp_path):
    """With its own policy, which would refuse any request and say so."""
    picture = tmp_path / "shot.png"
    _, log = browse("report.html", None, f"--screenshot={picture}", "--window-size=1280,3000")
    assert picture.stat().st_size > 50_000
    assert "CONSOLE" not in log
    bad = '<body onload="console.log(1); nothing()">'  # what messages would look like
    _, log = browse("bad.html", bad, "--dump-dom")
    assert log.count("CONSOLE") == 2


# ---- folders of all kinds ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FOLDER"),
        (["nowhere"], "nowhere': no such folder; give a run's or a sweep's folder"),
        (["empty"], "empty': holds no run, sweep or saved table that can be read"),
        (["run", "--baseline", "mode"], "--baseline 'mode': 'mode' is not NAME=VALUE; write as mode=sync,lag=1"),
        (["run", "--baseline", "mode=async"], "no setting is that; name one of: all runs"),
        (["run", "--traget", "1"], "unknown argument '--traget'; did you mean 'target'?"),
        (["run", "--target", "x"], "argument --target: invalid float value: 'x'"),
        (["run", "--target", "nan"], "--target nan: give a number, as 0.6"),
        (["run", "--compare"], "--compare with 1 folder(s): give two"),
        (["run", "run", "--compare", "--target", "1"], "--compare takes neither --baseline nor --target"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", random.Random(0), pipeline__mode="sync")
    (tmp_path / "empty").mkdir()
    assert script(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "run" / "report").exists()


def half_written(folder: Path) -> None:
    write_run(folder, random.Random(0), status=None)
    for name in ("metrics.jsonl", "eval.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])


def only_a_config(folder: Path) -> None:
    write_run(folder, random.Random(0), status=None)
    for name in ("metrics.jsonl", "eval.jsonl", "decisions.jsonl"):
        (folder / name).unlink()


def only_an_error(folder: Path) -> None:
    folder.mkdir()
    (folder / "error.txt").write_text("no room")


def mixed(folder: Path) -> None:
    write_sweep(folder / "sweep", random.Random(0), modes(1), seeds=2)
    save(load(folder / "sweep"), folder / "saved", compact=True)
    write_run(folder / "other", random.Random(1), task__name="gsm8k", grpo__model_name="some/model", steps=4)
    only_an_error(folder / "dead")
    half_written(folder / "half")
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("hello")


KINDS = {
    "one seed": lambda f: write_sweep(f, random.Random(0), modes(1), seeds=1),
    "one run": lambda f: write_run(f, random.Random(0)),
    "one step": lambda f: write_run(f, random.Random(0), steps=1),
    "half-written": half_written,
    "only a config": only_a_config,
    "only an error": only_an_error,
    "failed": lambda f: write_run(f, random.Random(0), steps=5, status="failed"),
    "mixed": mixed,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", list(KINDS))
def test_any_folder_gives_a_page(tmp_path, kind):
    KINDS[kind](tmp_path / "f")
    page = Page(write_report(load(tmp_path / "f"), tmp_path / "out"))
    text = (tmp_path / "out" / "report.html").read_text()
    assert "nan" not in re.sub(r'src="data:[^"]*"', "", text).lower()
    assert page.tables
    if kind != "mixed":
        assert "±" not in re.sub("± is the", "", text)  # one run each: no interval
        assert "] (p" not in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", list(KINDS))
def test_any_folder_can_be_compared(tmp_path, sweep, kind):
    KINDS[kind](tmp_path / "f")
    for first, second in ((tmp_path / "f", sweep), (sweep, tmp_path / "f")):
        Page(write_comparison(load(first), load(second), tmp_path / "out"))


def test_compare_by_script(tmp_path, sweep, capsys):
    again = write_sweep(tmp_path / "second", random.Random(7), [{**s, "grpo__lr": 2e-3} for s in modes(1)], seeds=3)
    assert script(sweep, again, "--compare", "--out", tmp_path / "out") == 0
    assert capsys.readouterr().err == ""
    page = Page(tmp_path / "out" / "report.html")
    assert len(page.tables) == 4  # reward, accuracy, and both summaries
    rows = ["mode sync", "mode async, lag 1", "mode staleness, lag 1", "mode overlap, lag 1"]
    assert [row[0] for row in page.tables[0]] == ["setting", *rows]
    text = (tmp_path / "out" / "report.html").read_text()
    assert "grpo.lr: 0.0004 in first, 0.002 in second" in text
    assert "Every difference is second minus first" in text


def test_a_report_in_the_sweeps_folder_is_not_read_as_a_run(tmp_path):
    folder = write_sweep(tmp_path / "sweep", random.Random(0), modes(1), seeds=2)
    assert script(folder) == 0
    assert (folder / "report" / "report.html").is_file()
    assert len(load(folder).trials) == len(load(tmp_path).trials) == 8


# ---- pieces ----


def test_text_is_escaped():
    bad = "<script>alert(1)</script>"
    table = {"heading": bad, "table": pd.DataFrame({"<a>": [bad]}), "caption": 'say "so" & <b>'}
    page = TEMPLATE.render(title=bad, blocks=[table, {"bullets": [bad], "pictures": [(bad, "", bad)]}], command=bad)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 8
    assert "&lt;a&gt;" in page
    assert "<b>" not in page


def test_baselines_are_values():
    args = parse_report_command(["a", "--baseline", "mode=async, lag=8,grpo.lr=1.0e-3"])
    assert args.baseline == {"mode": "async", "lag": 8, "grpo.lr": 0.001}
    with pytest.raises(ConfigError):
        parse_report_command(["a", "--baseline", "mode="])
