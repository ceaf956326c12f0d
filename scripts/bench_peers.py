"""This project beside TRL's GRPOTrainer on the same work: speed, memory, time to a target, accuracy over seconds.

python scripts/bench_peers.py tiny                            # the built-in model, 64 completions of exactly 32 tokens
python scripts/bench_peers.py smollm2 --grpo.model_name path/to/SmolLM2-135M-Instruct --model.dtype bfloat16
python scripts/bench_peers.py target --target 0.6             # seconds until held-out accuracy is 0.6
python scripts/bench_peers.py curve --config scripts/configs/smollm2_addition.yaml --every 4    # TRL: as many seconds
"""

import argparse
import os
from datetime import datetime
from pathlib import Path

from benchmark import MODES, count, share

from overlaprl_ray.config.cli import parse_command_line, run_script
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runtime.signals import Stopped, stoppable

CONFIGS = Path(__file__).parent / "configs"
WORKS = ("tiny", "smollm2", "target", "curve")


def options(parser: argparse.ArgumentParser) -> None:
    """What a comparison takes beside the settings of a run."""
    group = parser.add_argument_group("comparison")
    about = "what is done; its settings are those of scripts/configs/peers_WORK.yaml (curve: of --config)"
    group.add_argument("work", choices=WORKS, metavar="WORK", help=f"{' | '.join(WORKS)}: {about}")
    repeats = "runs of each arm, interleaved, a seed each (default: 3; curve: 1)"
    group.add_argument("--repeats", type=count, metavar="N", help=repeats)
    arms = ["overlap", "sync", "trl"]
    group.add_argument("--arms", nargs="+", choices=[*MODES, "trl"], default=arms, help=f"default: {' '.join(arms)}")
    threads = "threads to run TRL at, an arm each (default: 1 2; curve: 2)"
    group.add_argument("--trl-threads", nargs="+", type=count, metavar="N", help=threads)
    bf16 = (
        "with model.dtype bfloat16, an arm each: float32 weights under autocast, or all in bfloat16 (default: both; "
        "target and curve: autocast, for bfloat16 weights lose small updates)"
    )
    group.add_argument("--trl-bf16", nargs="+", choices=["autocast", "weights"], help=bf16)
    warm_up = "steps left out at the start (default: 5; smollm2: 2)"
    group.add_argument("--warm-up", type=count, metavar="N", help=warm_up)
    every = "target, curve: steps between evaluations (default: 10)"
    group.add_argument("--every", type=count, metavar="N", help=every)
    target = "target, curve: held-out accuracy to report the seconds to (default: target 0.6; curve none)"
    group.add_argument("--target", type=share, metavar="A", help=target)
    group.add_argument("--out", dest="output.dir", metavar="FOLDER", default=argparse.SUPPRESS, help="= --output.dir: "
                       "the comparison's folder (default: runs/<time>-peers-WORK)")  # fmt: skip


def main(argv: list[str]) -> None:
    """Parse, then measure, or print what would be measured."""
    if argv and argv[0] in WORKS[:3] and not any(word.split("=")[0] == "--config" for word in argv):
        argv = [*argv, "--config", str(CONFIGS / f"peers_{argv[0]}.yaml")]
    config, args = parse_command_line("bench_peers.py", "Side by side with TRL on the same work.", argv, options)
    if args.config is None:
        example = "bench_peers.py curve --config scripts/configs/smollm2_addition.yaml"
        raise ConfigError(f"{args.work}: no settings; name the work first, and for curve give them: {example}")
    learning = args.work in ("target", "curve")
    if not learning and (args.every or args.target is not None):
        raise ConfigError(f"--every, --target: {args.work} measures speed and evaluates nothing; use target or curve")
    from rich.console import Console  # only now: a slip should not wait for torch and Ray

    from overlaprl_ray.peers.arms import choose_arms
    from overlaprl_ray.peers.bench import Plan, check_plan, run_bench
    from overlaprl_ray.peers.report import table
    from overlaprl_ray.runtime.inputs import check_output

    cores = os.cpu_count() or 1
    threads = args.trl_threads or ([min(2, cores)] if args.work == "curve" else sorted({1, min(2, cores)}))
    bf16 = args.trl_bf16 or (["autocast"] if learning else ["autocast", "weights"])
    target = 0.6 if args.work == "target" and args.target is None else args.target
    plan = Plan(
        work=args.work,
        config=config,
        arms=choose_arms(config, args.arms, threads, bf16),
        repeats=args.repeats or (1 if args.work == "curve" else 3),
        warm_up=args.warm_up or (2 if args.work == "smollm2" else 5),
        every=(args.every or 10) if learning else None,
        target=target,
    )
    check_plan(plan)
    console = Console(soft_wrap=True)
    if args.dry_run:
        console.print(f"{plan.repeats} × {', '.join(arm.label for arm in plan.arms)}", highlight=False)
        return
    folder = Path(config.output.dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-peers-{args.work}").expanduser().absolute()
    check_output(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with stoppable():  # SIGTERM too: the arm that runs is a process of its own, and must end with this one
            found = run_bench(plan, folder, console)
    except Stopped as signal:
        raise RunError(f"stopped by {signal}; what was measured so far is in {folder}") from None
    console.print(table(found))
    console.print(f"files: {folder}", highlight=False)


if __name__ == "__main__":
    run_script(main)
