"""Watching runs from outside: Ray's dashboard, Prometheus on Ray's metrics, and the Grafana dashboard for them.

Ray writes Prometheus' and Grafana's configurations into its session's folder. `watch` starts Prometheus with the one
there, moves on to each new Ray, and puts the dashboard next to Ray's own.

    python scripts/watch.py        # in one terminal; runs in others
"""

import contextlib
import json
import math
import re
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

import yaml

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runs.files import replace_text

POLL_S = 2.0


def greeting(context: Any) -> str | None:
    """Ray's dashboard's address and how to log in, None without one. `context` is what `ray.init` returned."""
    if not context.dashboard_url:
        return None
    return f"Ray dashboard: http://{context.dashboard_url} (log in with the token that `ray get-auth-token` prints)"


def session_latest() -> Path:
    """The folder of this machine's newest Ray, which need not exist."""
    from ray._common.utils import get_default_ray_temp_dir

    return Path(get_default_ray_temp_dir()) / "session_latest"


def provision(session: Path) -> Path | None:
    """Put the Grafana dashboard next to Ray's own, where Ray's Grafana configuration looks.

    Returns its path, or None where the session has no such folder: no Ray dashboard, or another machine.
    """
    folder = session / "metrics" / "grafana" / "dashboards"
    if not folder.is_dir():
        return None
    replace_text(folder / "overlaprl.json", json.dumps(dashboard()))
    return folder / "overlaprl.json"


def watch(
    session: Path, port: int, data: Path, say: Callable[[str], None], until: Callable[[], bool] = lambda: False
) -> None:
    """Run Prometheus on a Ray session's metrics, and on its successors' where `session` is a link, until interrupted.

    It listens on 127.0.0.1 only. Raises `ConfigError` without Prometheus, `RunError` where it ends by itself.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise ConfigError("prometheus: not found on PATH; install it (Debian, Ubuntu: apt-get install prometheus)")
    data.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlaprl-watch-")))
        config, log = scratch / "prometheus.yml", scratch / "log"
        config.write_text("global:\n  scrape_interval: 10s\n", encoding="utf-8")  # until there is a Ray
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}",
                   f"--web.listen-address={address}", "--log.level=error"]  # fmt: skip
        errors = stack.enter_context(log.open("w", encoding="utf-8"))
        process = stack.enter_context(subprocess.Popen(command, stderr=errors))
        stack.callback(process.terminate)
        ready, followed = False, None
        while not until():
            if process.poll() is not None:
                last = log.read_text(encoding="utf-8").strip()[-300:]
                raise RunError(f"prometheus ended with {process.returncode}: {last}")
            if not ready and (ready := _answers(f"http://{address}/-/ready")):
                say(f"Prometheus: http://{address}, data in {data}")
            source = session / "metrics" / "prometheus" / "prometheus.yml"
            if ready and session.resolve() != followed and source.is_file() and provision(session):
                followed = session.resolve()
                # a copy, so that Prometheus never reads one that Ray has half written or removed
                shutil.copyfile(source, config)
                process.send_signal(signal.SIGHUP)
                say(f"reading the metrics of {followed.name}")
                settings = session / "metrics" / "grafana" / "grafana.ini"
                say(f"Grafana: grafana server --homepath /usr/share/grafana --config {settings}")
            time.sleep(POLL_S)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return reply.status == 200
    return False


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard: the panels of grafana.yaml under their headings, three to a line of Grafana's 24 units."""
    board = yaml.safe_load((files("overlaprl_ray.runs") / "grafana.yaml").read_text(encoding="utf-8"))
    panels, y = [], 0
    for title, row in board.pop("rows").items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        for i, panel in enumerate(row):
            panels.append(_panel(**panel, gridPos={"h": 8, "w": 8, "x": 8 * (i % 3), "y": y + 1 + 8 * (i // 3)}))
        y += 1 + 8 * math.ceil(len(row) / 3)
    return {**board, "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)]}


def _panel(queries: dict[str, str], **panel: Any) -> dict[str, Any]:
    targets = [
        {
            "refId": reference,
            "expr": re.sub(r"(\w+)\{", r'ray_overlaprl_\1{run=~"$run",trial=~"$trial",', query),
            "legendFormat": f"{legend} {{{{run}}}} {{{{trial}}}}".strip(),
        }
        for reference, (legend, query) in zip("AB", queries.items(), strict=False)
    ]
    shared = {
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
    }
    return {**shared, **panel, "targets": targets}
