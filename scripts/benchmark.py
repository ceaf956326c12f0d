"""All modes side by side on the same work: speed, overlap, memory, and what was learned.

python scripts/benchmark.py --steps 60                             # the built-in model
python scripts/benchmark.py --model Qwen/Qwen2.5-0.5B --steps 20 --task.name gsm8k
python scripts/benchmark.py --modes sync overlap --repeats 5 --threads-sync 1 2 --target-accuracy 0.6

Runs are interleaved, a seed per repeat. Overlap efficiency = bound / measured step time, the bound from the stage times
of `sync` (one thread count, the same work): stages that overlap slow one another down and would flatter the figure.
"""

import argparse
import json
import os
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, get_args

from overlaprl_ray.config import ExperimentConfig, PipelineConfig
from overlaprl_ray.config.cli import parse_command_line, run_script
from overlaprl_ray.runs.files import read_rows

MODES = get_args(PipelineConfig.model_fields["mode"].annotation)
FIGURES = {"step_s": "s/step", "speed_up": "× sync", "efficiency": "efficiency", "overlap_fraction": "overlap",
           "tokens_per_s": "tokens/s", "reward_last_10": "final reward", "accuracy_final": "accuracy",
           "seconds_to_target": "s to target", "memory_gb": "memory GB"}  # fmt: skip


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def options(parser: argparse.ArgumentParser) -> None:
    """What a benchmark takes beside the settings of a run."""
    group = parser.add_argument_group("benchmark")
    for name, setting, letter in (("model", "grpo.model_name", "M"), ("steps", "grpo.num_steps", "N"),
                                  ("out", "output.dir", "FOLDER")):  # fmt: skip
        group.add_argument(f"--{name}", dest=setting, metavar=letter, default=argparse.SUPPRESS, help=f"= --{setting}")
    group.add_argument("--repeats", type=count, default=3, metavar="N", help="runs of each mode, in turns (default: 3)")
    group.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all four")
    threads = "also run sync with so many threads, for it has the cores to itself (default without a GPU: 2)"
    group.add_argument("--threads-sync", nargs="+", type=count, metavar="N", help=threads)
    group.add_argument("--target-accuracy", type=float, metavar="A", help="held-out accuracy to report the seconds to")


def variants(modes: list[str], threads: int, sync_threads: list[int]) -> dict[str, tuple[str, int]]:
    """What is measured, by label: a mode and its threads per actor."""
    plain = {mode: (mode, threads) for mode in dict.fromkeys(modes)}
    more = {f"sync, {n} threads": ("sync", n) for n in sync_threads if n != threads and "sync" in modes}
    return plain | more


def figures_of(folder: Path, summary: dict[str, Any], target: float | None) -> dict[str, Any]:
    """What one run's folder says."""
    rows = read_rows(folder / "metrics.jsonl")
    walls = {0: 0.0, **{row["step"]: row["wall_s"] for row in rows}}
    reached = [
        walls[e["step"]] for e in read_rows(folder / "eval.jsonl") if target is not None and e["accuracy"] >= target
    ]
    memory = [sum(v for name, v in row.items() if name.startswith("memory/")) for row in rows]
    return {
        "step_s": 1 / summary["steps_per_s"],
        "overlap_fraction": summary["overlap_fraction"],
        "tokens_per_s": summary["tokens"] / summary["steps"] * summary["steps_per_s"],
        "reward_last_10": summary["reward_last_10"],
        "accuracy_final": summary["accuracy_final"],
        "seconds_to_target": reached[0] if reached else None,
        "memory_gb": max(memory),
        "stages": summary["stages_s"],
        **{name: value for name, value in rows[-1].items() if name.startswith("memory/")},
    }


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per label: its texts, and the median and range of each figure (a missing value ranks last)."""
    table = []
    for label in dict.fromkeys(run["label"] for run in runs):
        own = [run for run in runs if run["label"] == label]
        row: dict[str, Any] = {name: value for name, value in own[0].items() if isinstance(value, str)}
        row["runs"] = len(own)
        for name in own[0]:
            if isinstance(own[0][name], float | None):
                values = sorted((run[name] for run in own), key=lambda v: (v is None, v))
                row |= {name: values[len(values) // 2], f"{name}_range": [values[0], values[-1]]}
        table.append(row)
    return table


def print_table(title: str, names: list[str], rows: list[list[Any]]) -> None:
    """A table for a terminal: texts, numbers, and a dash for what is missing."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=None)
    for place, name in enumerate(names):
        out.add_column(name, justify="right" if place else "left")
    for row in rows:
        out.add_row(*("-" if v is None else f"{v:,.3g}" if isinstance(v, float) else str(v) for v in row))
    Console(soft_wrap=True).print(out)


def compare(runs: list[dict[str, Any]], lag: int, cores: int | None) -> list[dict[str, Any]]:
    """`medians`, with speed-up over plain sync and efficiency."""
    from overlaprl_ray.runs.summary import bounds

    table = medians(runs)
    for row in table:
        own = [run["stages"] for run in runs if run["label"] == row["label"]]
        row["stages"] = {name: median(stages[name] for stages in own) for name in own[0]}
    sync = next((row for row in table if row["label"] == "sync"), None)
    for row in table:
        stages = row["stages"] if row["mode"] == "sync" else sync["stages"] if sync else None
        bound = bounds(stages, row["mode"], 0 if row["mode"] == "sync" else lag, cores)["bound"] if stages else None
        row["efficiency"] = bound / row["step_s"] if bound else None
        row["speed_up"] = sync["step_s"] / row["step_s"] if sync else None
    return table


def measure(config: ExperimentConfig, what: dict[str, tuple[str, int]], args: argparse.Namespace, folder: Path) -> None:
    """Run everything, write benchmark.json anew after every run, and show the table."""
    from rich.console import Console

    from overlaprl_ray.runs.environment import environment
    from overlaprl_ray.runtime.train import ray_running, train

    runs: list[dict[str, Any]] = []
    where = environment()
    with ray_running():
        for repeat in range(1, args.repeats + 1):
            for label, (mode, threads) in what.items():
                place = folder / f"r{repeat}-{label.replace(', ', '-').replace(' ', '-')}"
                run = config.with_setting("pipeline.mode", mode).with_setting("resources.threads", threads)
                run = run.with_setting("output.dir", str(place)).with_setting("seed", config.seed + repeat - 1)
                print(f"{label}, repeat {repeat} of {args.repeats}", flush=True)
                summary = train(run, Console(quiet=True))
                about = {"label": label, "mode": mode, "threads": threads, "repeat": repeat}
                runs.append(about | figures_of(place, summary, args.target_accuracy))
                cores = None if where["gpus"] else max(1, (os.cpu_count() or 1) // config.resources.threads)
                found = {
                    "environment": where,
                    "config": config.model_dump(mode="json"),
                    "modes": compare(runs, config.pipeline.lag, cores),
                    "runs": runs,
                }
                (folder / "benchmark.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table = found["modes"]
    figures = [[title, *(row[name] for row in table)] for name, title in FIGURES.items()]
    print_table(f"medians of {args.repeats}", ["", *(row["label"] for row in table)], figures)
    print(f"files: {folder}")


def main(argv: list[str]) -> None:
    """Parse, then run, or print what would be run."""
    config, args = parse_command_line("benchmark.py", "All modes side by side on the same work.", argv, options)
    from overlaprl_ray.runtime.inputs import check_output
    from overlaprl_ray.runtime.preflight import available_gpus, dry_run

    both = args.threads_sync or ([] if available_gpus() else [min(2, os.cpu_count() or 1)])
    what = variants(args.modes, config.resources.threads, both)
    if args.dry_run:
        dry_run(config)
        return print(f"# {args.repeats} × {'; '.join(what)}")
    folder = Path(config.output.dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-benchmark").expanduser().absolute()
    check_output(str(folder))
    measure(config, what, args, folder)


if __name__ == "__main__":
    run_script(main)
