"""All modes side by side on the same work: speed, overlap, and what was learned.

python scripts/benchmark.py                                        # the built-in model, about 5 minutes on 2 cores
python scripts/benchmark.py --model Qwen/Qwen2.5-0.5B --steps 20 --task.name gsm8k
python scripts/benchmark.py --modes sync overlap --repeats 5 --threads-sync 1 2 --target-accuracy 0.6
"""

import argparse
import os
from datetime import datetime
from pathlib import Path
from typing import get_args

from overlaprl_ray.cli import parse_command_line, run_script
from overlaprl_ray.config import PipelineConfig
from overlaprl_ray.errors import ConfigError

MODES = get_args(PipelineConfig.model_fields["mode"].annotation)


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1")
    return value


def options(parser: argparse.ArgumentParser) -> None:
    """What a benchmark takes beside the settings of a run."""
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--model", dest="grpo.model_name", metavar="M", default=argparse.SUPPRESS, help="= --grpo.model_name"
    )
    group.add_argument(
        "--steps", dest="grpo.num_steps", metavar="N", default=argparse.SUPPRESS, help="= --grpo.num_steps"
    )
    group.add_argument("--repeats", type=count, default=3, help="runs of each mode, interleaved (default: 3)")
    group.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all four")
    threads = "threads per actor to measure sync at too, which has the cores to itself (default without a GPU: 2)"
    group.add_argument("--threads-sync", nargs="+", type=count, metavar="N", help=threads)
    group.add_argument("--target-accuracy", type=share, metavar="A", help="held-out accuracy to report the seconds to")
    group.add_argument("--out", metavar="FOLDER", help="where all is written (default: runs/<time>-benchmark)")


def main(argv: list[str]) -> None:
    """Parse, then run, or print what would be run."""
    config, args = parse_command_line("benchmark.py", "All modes side by side on the same work.", argv, options)
    if config.output.dir is not None:
        raise ConfigError(
            f"output.dir = '{config.output.dir}': each run here gets its own; use --out for the benchmark"
        )
    from rich.console import Console

    from overlaprl_ray.benchmark import BenchmarkPlan, run_benchmark, variants
    from overlaprl_ray.benchmark_report import table
    from overlaprl_ray.preflight import available_gpus, check_output
    from overlaprl_ray.run import dry_run

    check_output(args.out)
    threads = args.threads_sync
    if threads is None:
        threads = [] if available_gpus() else [min(2, os.cpu_count() or 1)]
    plan = BenchmarkPlan(list(dict.fromkeys(args.modes)), args.repeats, threads, args.target_accuracy)
    console = Console(soft_wrap=True)
    if args.dry_run:
        dry_run(config, console)
        console.print(f"# {plan.repeats} × {', '.join(variants(config, plan))}", highlight=False)
        return
    folder = Path(args.out).expanduser() if args.out else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-benchmark"
    folder = folder.absolute()
    found = run_benchmark(config, plan, folder, console)
    console.print(table(found))
    console.print(f"files: {folder}", highlight=False)


if __name__ == "__main__":
    run_script(main)
