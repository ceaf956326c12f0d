"""One run, watched from outside by what users have: Prometheus, Grafana's schema, and a browser on Ray's dashboard."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import read_jsonl

from overlaprl_ray.runs.monitoring import dashboard
from overlaprl_ray.runs.ray_metrics import GAUGES, PHASES, STAGES

ROOT = Path(__file__).parents[1]
STEPS = 90
ACTORS = ("generator", "reference", "learner")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)


@dataclass
class Watched:
    """A run that waits for its release, or has ended."""

    folder: Path
    dashboard: str
    prometheus: str
    process: subprocess.Popen[str]
    lines: list[str]
    release: Path

    def finish(self) -> None:
        """Let the run end and its last values arrive."""
        self.release.touch()
        wait_until(lambda: "done" in self.lines or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.lines
        wait_until(lambda: [v for _, v in self.query("ray_overlaprl_steps_total")] == [STEPS], 60)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """An instant query: (labels, value) of each series."""
        return [(found["metric"], float(found["value"][1])) for found in self._get("query", query=expression)]

    def history(self, expression: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """The samples as scraped in the last half hour."""
        found = self._get("query", query=f"{expression}[30m]")
        return [(f["metric"], [(float(t), float(v)) for t, v in f["values"]]) for f in found]

    def _get(self, call: str, **parameters: str) -> list[dict]:
        url = f"{self.prometheus}/api/v1/{call}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]["result"]


def wait_until(true, seconds: float) -> bool:
    """Whether a condition became true in time."""
    deadline = time.monotonic() + seconds
    while not (found := bool(true())) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def end(process: subprocess.Popen, ask: bool = True) -> None:
    """Ask a process to end (or wait where it has been told already); kill it after a minute."""
    if ask:
        process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture(scope="module")
def watched(cache, tmp_path_factory):
    """`tests/watched.py`, with `scripts/watch.py` on its Ray, held at its first steps."""
    place = tmp_path_factory.mktemp("watched")
    folder, release = place / "demo", place / "release"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "PACED_RELEASE": str(release), "RAY_ADDRESS": "local"}
    run = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "watched.py"), str(folder), str(STEPS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=place,
    )  # fmt: skip
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(line.rstrip() for line in run.stdout), daemon=True).start()
    watcher = None
    try:
        assert wait_until(lambda: lines, 120)
        about = json.loads(lines[0])
        port = free_port()
        if shutil.which("prometheus"):
            watcher = start_watching(Path(about["session"]), port, place / "prometheus", environment)
        run.stdin.write("\n")
        run.stdin.flush()
        dashboard = re.search(r"http://127\.0\.0\.1:\d+", about["greeting"])[0]
        yield Watched(folder, dashboard, f"http://127.0.0.1:{port}", run, lines, release)
    finally:
        if watcher:
            end(watcher)
        release.touch()
        run.stdin.close()  # the end of its input tells it to stop Ray
        end(run, ask=False)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_watching(session: Path, port: int, data: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """`scripts/watch.py` on a Ray, once it reads it."""
    options = ["--session", str(session), "--port", str(port), "--data", str(data)]
    command = [sys.executable, str(ROOT / "scripts" / "watch.py"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    said = [process.stdout.readline() for _ in range(3)]
    assert said[0].startswith(f"Prometheus: http://127.0.0.1:{port}, data in")
    assert "grafana.ini" in said[2]
    assert (session / "metrics" / "grafana" / "dashboards" / "overlaprl.json").exists()
    return process


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
def test_dashboard_shows_the_actors_and_the_job(watched):
    playwright = pytest.importorskip("playwright.sync_api")
    assert wait_until(lambda: any(line.startswith("step ") for line in watched.lines), 240)
    ray = shutil.which("ray", path=Path(sys.executable).parent)
    token = subprocess.run([ray, "get-auth-token"], capture_output=True, text=True, check=True).stdout.strip()
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.set_default_timeout(60_000)
        page.goto(f"{watched.dashboard}/#/actors", wait_until="domcontentloaded")
        page.get_by_role("dialog").locator("input").fill(token)  # without it there is nothing but this
        page.get_by_role("button", name="Submit").click()
        for role in ACTORS:
            row = page.get_by_role("row").filter(has_text=f"demo/{role}")
            row.get_by_text("ALIVE").wait_for()
            assert f"{role.capitalize()}Actor" in row.inner_text()
        assert page.get_by_text("ALIVE").count() >= 3
        shoot(page, "actors.png")
        page.goto(f"{watched.dashboard}/#/jobs")
        row = page.get_by_role("row").filter(has_text="watched.py")
        row.get_by_text("RUNNING").wait_for()
        shoot(page, "jobs.png")
        browser.close()


def shoot(page, name: str) -> None:
    """Keep a picture where OVERLAPRL_SCREENSHOTS says so, for a person to look at."""
    if folder := os.environ.get("OVERLAPRL_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / name))


@pytest.mark.slow
@needs_prometheus
def test_prometheus_has_every_metric_with_its_tags_as_the_run_wrote_it(watched):
    watched.finish()
    rows = read_jsonl(watched.folder / "metrics.jsonl")
    assert len(rows) == STEPS
    tags = {"run": "demo", "trial": "none", "mode": "overlap", "seed": "0"}

    def last(name: str, **labels: str) -> float:
        found = [
            (metric, samples)
            for metric, samples in watched.history(f"ray_overlaprl_{name}")
            if labels.items() <= metric.items()
        ]
        assert len(found) == 1, (name, labels, found)
        assert tags.items() <= found[0][0].items()
        return found[0][1][-1][1]

    for name, column in GAUGES.items():
        values = [row[column] for row in rows if row[column] is not None]
        assert last(name) == pytest.approx(values[-1]), name
    evaluations = read_jsonl(watched.folder / "eval.jsonl")
    assert last("accuracy") == pytest.approx(evaluations[-1]["accuracy"])
    assert last("queue_depth") == 0
    for role in ACTORS:
        assert last("memory_gb", actor=role) == pytest.approx(rows[-1][f"memory/{role}_gb"])

    assert last("steps_total") == STEPS
    assert last("tokens_total") == rows[-1]["tokens"]
    assert last("samples_total") == rows[-1]["samples"]
    decided = [row["staleness/decision"] for row in rows]
    assert decided.count("discard") > 0
    for decision in set(decided):
        assert last("decisions_total", decision=decision) == decided.count(decision)
    cells = [cell for row in read_jsonl(watched.folder / "decisions.jsonl") for cell in row["cells"]]
    for place, trait in enumerate(("length", "reward", "difficulty")):
        for quarter, decision in {(cell[place], cell[3]) for cell in cells}:
            count = sum(cell[4] for cell in cells if (cell[place], cell[3]) == (quarter, decision))
            assert last("rows_total", trait=trait, quarter=str(quarter), decision=decision) == count
    for stage in STAGES:
        seconds = [row[f"time/{stage}"] for row in rows if row[f"time/{stage}"] is not None]
        assert last("stage_seconds_total", stage=stage) == pytest.approx(sum(seconds))
        assert last("stage_duration_seconds_count", stage=stage) == len(seconds)
        for bound in ("0.1", "1.0"):
            below = sum(second <= float(bound) for second in seconds)
            assert last("stage_duration_seconds_bucket", stage=stage, le=bound) == below


@pytest.mark.slow
@needs_prometheus
def test_prometheus_saw_the_metrics_move_as_the_run_did(watched):
    watched.finish()
    rows = {row["step"]: row for row in read_jsonl(watched.folder / "metrics.jsonl")}
    steps = dict(watched.history("ray_overlaprl_step")[0][1])
    rewards = dict(watched.history("ray_overlaprl_reward")[0][1])
    seen = sorted(set(steps.values()))
    assert len(seen) >= 4
    assert list(steps.values()) == sorted(steps.values())
    agree = [rewards[t] == pytest.approx(rows[int(step)]["reward"]) for t, step in steps.items() if t in rewards]
    assert len(agree) >= 4
    assert agree.count(False) <= 1  # sent between two gauges of one step

    own = {"generator": {"generate", "evaluate"}, "reference": {"score"}, "learner": {"train", "publish", "save"}}
    found = {metric["actor"]: samples for metric, samples in watched.history("ray_overlaprl_phase")}
    assert set(found) == set(own)
    for actor, samples in found.items():
        assert {PHASES[int(value)] for _, value in samples} <= own[actor] | {"idle"}
    # held in its reward function for as long as this run was, the generator was seen at work
    assert "generate" in {PHASES[int(value)] for _, value in found["generator"]}


def test_grafana_dashboard_is_what_its_schema_version_allows():
    """A round trip through Grafana's own types for that schema loses what they do not know."""
    sdk = pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    assert sdk
    register_default_plugins()  # the types of each kind of panel, and of Prometheus queries
    board = dashboard()
    assert board["schemaVersion"] == Dashboard().schema_version
    understood = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(lost(board, understood)) == []
    spoiled = dashboard()
    spoiled["panels"][1]["fieldConfig"]["defaults"]["custom"]["fillOpacty"] = 1
    assert list(lost(spoiled, json.loads(json.dumps(Dashboard.from_json(spoiled), cls=JSONEncoder)))) != []
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)


def lost(before, after, path=""):
    """Where something of `before` is missing or different in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after[key], f"{path}/{key}") if key in after else [f"{path}/{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{index}")
    elif before != after:
        yield path


@pytest.mark.slow
@needs_prometheus
def test_every_query_of_the_grafana_dashboard_returns_data(watched):
    watched.finish()
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) >= 20
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            queries.append(f"count by ({inner[2]}) ({inner[1]})")
    for query in queries:
        # gauges end with their run, so this looks at the middle of it, as Grafana does over a range
        expression = query.replace("$run", "demo").replace("$trial", "none|").replace("$__rate_interval", "1m")
        found = watched.query(f"last_over_time(({expression})[10m:5s])")
        assert found, query
        assert any(value == value for _, value in found), f"only NaN: {query}"
