"""Watching runs from outside: Ray's dashboard, Prometheus on Ray's metrics, and the Grafana dashboard for them.

Ray writes configurations for both under its session's folder, and tells Prometheus there which ports to read. `watch`
starts Prometheus with that one, and goes over to a new Ray when there is one; the Grafana dashboard of this package is
laid beside Ray's own.

    python scripts/watch.py        # in one terminal; runs in others
"""

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from overlaprl_ray.errors import ConfigError, RunError

DASHBOARD = "overlaprl.json"
LOOK_EVERY_S = 2.0  # seconds between looks for a new Ray
NO_RAY = "global:\n  scrape_interval: 10s\n"  # what Prometheus is started with before there is a Ray


def greeting(context: Any) -> str | None:
    """Where Ray's dashboard is and how to log in; None where there is none. `context` is what `ray.init` returned."""
    address = context.dashboard_url
    if not address:
        return None
    return f"Ray dashboard: http://{address} (log in with the token that `ray get-auth-token` prints)"


def session_latest() -> Path:
    """The folder of this machine's newest Ray, which need not exist."""
    from ray._common.utils import get_default_ray_temp_dir

    return Path(get_default_ray_temp_dir()) / "session_latest"


def prometheus_config(session: Path) -> Path:
    """What Ray has written for Prometheus."""
    return session / "metrics" / "prometheus" / "prometheus.yml"


def provision(session: Path) -> Path | None:
    """Lay the Grafana dashboard beside Ray's own, which Ray's Grafana configuration points at.

    Returns its path, or None where the session has no such folder: no dashboard, or on another machine.
    """
    folder = session / "metrics" / "grafana" / "dashboards"
    if not folder.is_dir():
        return None
    scratch = folder / f"{DASHBOARD}.part"
    scratch.write_text(dashboard_text(), encoding="utf-8")
    return scratch.replace(folder / DASHBOARD)


def dashboard_text() -> str:
    """The Grafana dashboard, as JSON."""
    return (files("overlaprl_ray.runs") / "grafana" / DASHBOARD).read_text(encoding="utf-8")


def find_prometheus() -> str:
    """The Prometheus on this machine. Raises `ConfigError` where there is none."""
    found = shutil.which("prometheus")
    if found is None:
        raise ConfigError("prometheus: not found on PATH; install it (Debian, Ubuntu: apt-get install prometheus)")
    return found


def watch(
    session: Path, port: int, data: Path, say: Callable[[str], None], until: Callable[[], bool] = lambda: False
) -> None:
    """Run Prometheus on a Ray session's metrics, and on its successors' where `session` is a link, until interrupted.

    It listens on 127.0.0.1 only. Raises `ConfigError` without Prometheus, `RunError` where it ends by itself.
    """
    program = find_prometheus()
    data.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="overlaprl-watch-") as scratch:
        config, log = Path(scratch) / "prometheus.yml", Path(scratch) / "log"
        config.write_text(NO_RAY, encoding="utf-8")
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}",
                   f"--web.listen-address={address}", "--log.level=error"]  # fmt: skip
        with log.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(command, stderr=errors)
        followed: Path | None = None
        ready = False
        try:
            while not until():
                if process.poll() is not None:
                    last = log.read_text(encoding="utf-8").strip()[-300:]
                    raise RunError(f"prometheus ended with {process.returncode}: {last}")
                if not ready and (ready := _answers(f"http://{address}/-/ready")):
                    say(f"Prometheus: http://{address}, data in {data}")
                if ready:
                    followed = _follow(session, followed, config, process, say)
                time.sleep(LOOK_EVERY_S)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def _follow(
    session: Path, followed: Path | None, config: Path, process: subprocess.Popen[bytes], say: Callable[[str], None]
) -> Path | None:
    """Take over the configuration of the session there is now, if it is another than the last one."""
    now, source = session.resolve(), prometheus_config(session)
    if now == followed or not source.is_file() or provision(session) is None:
        return followed
    # a copy, so that Prometheus never reads one that Ray has half written or taken away
    config.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    process.send_signal(signal.SIGHUP)
    say(f"reading the metrics of {now.name}")
    say(f"Grafana: grafana server --homepath /usr/share/grafana --config {session}/metrics/grafana/grafana.ini")
    return now
