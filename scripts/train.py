"""One GRPO run.

python scripts/train.py                                                 # the built-in default
python scripts/train.py --pipeline.mode sync --seed 1
python scripts/train.py --config my.yaml --grpo.lr 1e-5 --dry-run
python scripts/train.py --resume runs/x                                 # go on with a run that was cut short
python scripts/train.py --replay runs/x                                 # repeat a run, and compare every row
"""

import argparse
from pathlib import Path

from overlaprl_ray.config.cli import parse_command_line, run_script
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runtime.inputs import check_inputs


def options(parser: argparse.ArgumentParser) -> None:
    """This script's own."""
    parser.add_argument("--resume", metavar="FOLDER", help="go on with the run in this folder, exactly")
    parser.add_argument("--replay", metavar="FOLDER", help="repeat the run in this folder serially; compare every row")
    parser.add_argument("--quiet", action="store_true", help="print the run's folder at its end, and nothing else")


def main(argv: list[str]) -> None:
    """Parse, then run or print the plan."""
    config, args = parse_command_line(
        "train.py", "One GRPO run; settings can also stand in a YAML file.", argv, options
    )
    if args.replay is not None:
        if len(argv) > 2:
            raise ConfigError(f"--replay {args.replay}: no other argument can be given with it; the folder says it all")
        from overlaprl_ray.runtime.repeat import repeat

        return print(repeat(Path(args.replay)))
    resume = args.resume is not None
    if args.dry_run:
        from overlaprl_ray.runtime.preflight import dry_run  # only now: --help should not wait for imports

        dry_run(config, resuming=resume)
        return
    task = check_inputs(config, resume)  # before the next imports: a slip should not wait for Ray's
    from rich.console import Console

    from overlaprl_ray.runtime.train import train

    summary = train(config, Console(quiet=True) if args.quiet else None, resume=resume, task=task)
    if args.quiet:
        print(summary["folder"])


if __name__ == "__main__":
    run_script(main)
