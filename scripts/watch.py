"""Prometheus for the runs on this machine, and where to point Grafana. Start it in a terminal of its own.

python scripts/watch.py                     # follows the newest Ray, also one that is started later
python scripts/watch.py --port 9091 --session /tmp/ray/session_latest
"""

import contextlib
import signal
from pathlib import Path

from overlaprl_ray.config.cli import Parser, run_script
from overlaprl_ray.errors import ConfigError


def main(argv: list[str]) -> None:
    """Parse, then watch until Ctrl-C."""
    parser = Parser(prog="watch.py", description="Prometheus on Ray's metrics, with a dashboard for Grafana.")
    parser.add_argument("--session", metavar="DIR", help="Ray's session folder (default: always the newest)")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus; Ray and Grafana expect 9090")
    parser.add_argument("--data", metavar="DIR", help="where Prometheus keeps its data (default: the cache folder)")
    args = parser.parse_args(argv)
    from overlaprl_ray.models.files import cache_folder
    from overlaprl_ray.runs.monitoring import session_latest, watch

    if args.session and not Path(args.session).is_dir():
        raise ConfigError(f"--session = '{args.session}': no such folder; give a Ray session's, or leave it out")
    session = Path(args.session or session_latest()).absolute()
    data = Path(args.data or cache_folder() / "prometheus").absolute()
    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        watch(session, args.port, data, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends Prometheus too
    run_script(main)
