"""Prometheus started on what Ray has written, and the Grafana dashboard put next to Ray's own."""

import json
import os
import shutil
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.monitoring import dashboard, greeting, provision, session_latest, watch

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)


def a_session(folder: Path, job: str) -> Path:
    """What a Ray session's folder has for Prometheus and Grafana."""
    (folder / "metrics" / "prometheus").mkdir(parents=True)
    (folder / "metrics" / "grafana" / "dashboards").mkdir(parents=True)
    text = f"scrape_configs:\n- job_name: '{job}'\n  file_sd_configs:\n  - files:\n    - '{folder}/discovery.json'\n"
    (folder / "metrics" / "prometheus" / "prometheus.yml").write_text(text)
    return folder


def wait_until(true, seconds: float = 60.0) -> bool:
    """Whether a condition became true in time."""
    deadline = time.monotonic() + seconds
    while not (found := bool(true())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_the_greeting_names_the_address_and_the_way_in():
    line = greeting(SimpleNamespace(dashboard_url="127.0.0.1:8265"))
    assert line == "Ray dashboard: http://127.0.0.1:8265 (log in with the token that `ray get-auth-token` prints)"
    assert greeting(SimpleNamespace(dashboard_url="")) is None


def test_the_dashboard_is_put_where_rays_grafana_looks(tmp_path):
    session = a_session(tmp_path / "s", "ray")
    path = provision(session)
    assert path == session / "metrics" / "grafana" / "dashboards" / "overlaprl.json"
    assert json.loads(path.read_text(encoding="utf-8")) == dashboard()
    assert dashboard()["uid"] == "overlaprlRay"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert provision(tmp_path / "none") is None  # a Ray without dashboard, or on another machine


def test_the_newest_session_is_where_ray_puts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert session_latest() == tmp_path / "ray" / "session_latest"


@needs_prometheus
def test_watching_moves_on_to_a_new_ray(tmp_path):
    link = tmp_path / "session_latest"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said, stop = [], threading.Event()

    def jobs() -> list[str]:
        reply = urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/status/config", timeout=5)
        lines = json.load(reply)["data"]["yaml"].splitlines()
        return [line.partition("job_name: ")[2] for line in lines if "job_name" in line]

    watching = threading.Thread(target=watch, args=(link, port, tmp_path / "data", said.append, stop.is_set))
    watching.start()
    try:
        assert wait_until(lambda: said)  # before there is any Ray
        assert jobs() == []
        link.symlink_to(a_session(tmp_path / "first", "first"))
        assert wait_until(lambda: jobs() == ["first"])
        assert wait_until(lambda: said[1:2] == ["reading the metrics of first"])
        link.unlink()
        link.symlink_to(a_session(tmp_path / "second", "second"))
        assert wait_until(lambda: jobs() == ["second"])
        assert (tmp_path / "second" / "metrics" / "grafana" / "dashboards" / "overlaprl.json").exists()
    finally:
        stop.set()
        watching.join(timeout=60)
    assert not watching.is_alive()
    with pytest.raises(OSError, match="refused"):
        jobs()


@needs_prometheus
def test_a_port_that_is_taken_ends_the_watch_with_prometheus_own_words(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=r"prometheus ended with 1: .*address already in use"):
            watch(tmp_path, taken.getsockname()[1], tmp_path / "data", print, lambda: False)


def test_without_prometheus_the_script_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    from watch import main

    with pytest.raises(ConfigError, match=r"prometheus: not found on PATH; install it .*apt-get install prometheus"):
        main(["--data", str(tmp_path)])
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(ConfigError, match=r"--session = '.*none': no such folder; give a Ray session's"):
        main(["--session", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="--port"):
        main(["--port", "x"])
