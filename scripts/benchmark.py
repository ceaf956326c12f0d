"""All modes side by side on the same work: speed, overlap, and what was learned.

python scripts/benchmark.py --steps 60                             # the built-in model
python scripts/benchmark.py --model Qwen/Qwen2.5-0.5B --steps 20 --task.name gsm8k
python scripts/benchmark.py --modes sync overlap --repeats 5 --threads-sync 1 2 --target-accuracy 0.6
"""

import argparse
import os
from datetime import datetime
from pathlib import Path
from typing import get_args

from overlaprl_ray.config import PipelineConfig
from overlaprl_ray.config.cli import parse_command_line, run_script
from overlaprl_ray.runtime.inputs import check_inputs

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
    group.add_argument("--out", dest="output.dir", metavar="FOLDER", default=argparse.SUPPRESS, help="= --output.dir: "
                       "the benchmark's folder (default: runs/<time>-benchmark); each run has one in it")  # fmt: skip


def main(argv: list[str]) -> None:
    """Parse, then run, or print what would be run."""
    config, args = parse_command_line("benchmark.py", "All modes side by side on the same work.", argv, options)
    check_inputs(config)
    from rich.console import Console  # only now: a slip should not wait for torch and Ray

    from overlaprl_ray.reports.benchmark import BenchmarkPlan, run_benchmark, variants
    from overlaprl_ray.reports.benchmark_report import tables
    from overlaprl_ray.runtime.preflight import available_gpus
    from overlaprl_ray.runtime.train import dry_run

    threads = args.threads_sync
    if threads is None:
        threads = [] if available_gpus() else [min(2, os.cpu_count() or 1)]
    plan = BenchmarkPlan(list(dict.fromkeys(args.modes)), args.repeats, threads, args.target_accuracy)
    console = Console(soft_wrap=True)
    if args.dry_run:
        dry_run(config, console)
        console.print(f"# {plan.repeats} × {', '.join(variants(config, plan))}", highlight=False)
        return
    folder = Path(config.output.dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-benchmark").expanduser().absolute()
    found = run_benchmark(config, plan, folder, console)
    console.print(tables(found))
    console.print(f"files: {folder}", highlight=False)


if __name__ == "__main__":
    run_script(main)
