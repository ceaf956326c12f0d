"""The command line of scripts/report.py; every mistake is one line.

args = parse_report_command(["runs/modes", "--baseline", "mode=sync"]); args.baseline == {"mode": "sync"}
"""

import argparse
from typing import Any

import yaml

from overlaprl_ray.config.cli import Parser
from overlaprl_ray.errors import ConfigError


def parse_report_command(argv: list[str]) -> argparse.Namespace:
    """Folders, `--compare`, `--baseline`, `--target`, `--out`, `--save`. Raises `ConfigError`."""
    about = "A table on the terminal, and a page, tables and figures in a folder."
    parser = Parser(prog="report.py", description=about, allow_abbrev=False)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run, sweep, folder of either, or saved tables")
    parser.add_argument("--compare", action="store_true", help="two folders: the second against the first, by setting")
    parser.add_argument("--baseline", metavar="NAME=VALUE,...", help="what others are held to (default: sync, else the "
                        "shortest lag without a rule, else the first setting)")  # fmt: skip
    parser.add_argument("--target", type=float, metavar="REWARD", help="reward whose time is taken (default: 90 %% of "
                        "the way from the start to the best setting's end)")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="where to write (default: report/ in the first folder)")
    parser.add_argument("--save", metavar="DIR", help="also write the runs as compact tables, to be kept or committed")
    args = parser.parse(argv)
    if args.compare and len(args.folders) != 2:
        raise ConfigError(
            f"--compare with {len(args.folders)} folder(s): give two, the first is what the second is held to"
        )
    if args.compare and (args.baseline or args.save or args.target is not None):
        raise ConfigError("--compare takes neither --baseline nor --target nor --save: it holds each setting to itself")
    if args.target is not None and args.target != args.target:
        raise ConfigError("--target nan: give a number, as 0.6")
    args.baseline = _baseline(args.baseline) if args.baseline else None
    return args


def _baseline(text: str) -> dict[str, Any]:
    """'mode=sync,lag=1' as values by name."""
    out = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise ConfigError(f"--baseline '{text}': '{part}' is not NAME=VALUE; write as mode=sync,lag=1")
        out[name.strip()] = yaml.safe_load(value)
    return out
