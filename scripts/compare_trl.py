"""This project beside TRL's GRPOTrainer on the same work: speed and memory, or accuracy over seconds.

python scripts/compare_trl.py speed --config scripts/configs/compare_tiny.yaml      # completions of exactly 32 tokens
python scripts/compare_trl.py learning --target 0.6 --repeats 3                     # built-in default: seconds to .6
python scripts/compare_trl.py learning --config scripts/configs/smollm2_addition.yaml --every 4    # as many seconds

Every arm runs once, then every arm again, each in a fresh process. `speed` leaves out the first steps (memory is
allocated, the pipeline fills) and the last (nothing is generated any more, which would flatter an overlapping arm).
`learning` trains each arm by itself; ours is run twice, timed and evaluated, and the two must be the same run.
"""

import argparse
import importlib.util
import itertools
import json
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from arm import Job, changed, measure
from benchmark import count, medians, print_table

from overlaprl_ray.config import TINY, ExperimentConfig
from overlaprl_ray.config.cli import parse_command_line, run_script
from overlaprl_ray.errors import ConfigError

NEVER = "<never>"  # an end of text that no model can produce


def options(parser: argparse.ArgumentParser) -> None:
    """What a comparison takes beside the settings of a run."""
    group = parser.add_argument_group("comparison")
    group.add_argument("work", choices=["speed", "learning"], help="fixed lengths, no evaluation; or accuracy over s")
    group.add_argument("--arms", nargs="+", choices=["sync", "async", "staleness", "overlap", "trl"],
                       default=["overlap", "sync", "trl"], help="default: overlap sync trl")  # fmt: skip
    group.add_argument(
        "--repeats", type=count, default=1, metavar="N", help="runs of each arm, a seed each (default 1)"
    )
    group.add_argument("--trl-threads", nargs="+", type=count, default=[1, 2], metavar="N", help="TRL's (default: 1 2)")
    group.add_argument("--warm-up", type=count, default=5, metavar="N", help="speed: steps left out (default: 5)")
    group.add_argument("--every", type=count, default=10, metavar="N", help="learning: steps between evaluations (10)")
    group.add_argument("--target", type=float, metavar="A", help="learning: train TRL until this accuracy, at most "
                       "grpo.num_steps; without it for as many seconds as our first arm took")  # fmt: skip


def jobs_of(config: ExperimentConfig, args: argparse.Namespace) -> list[Job]:
    """The arms in the order in which they run; `ConfigError` for what TRL cannot do. Of ours `sync` has all threads
    of the largest budget, for one of its actors computes at a time."""
    jobs = []
    learning = {"every": args.every, "target": args.target} if args.work == "learning" else {}
    for arm in dict.fromkeys(args.arms):
        threads = [max([*args.trl_threads, config.resources.threads]) if arm == "sync" else config.resources.threads]
        kinds: list[str | None] = [None]
        if arm == "trl":
            if importlib.util.find_spec("trl") is None:
                raise ConfigError("--arms trl: TRL is not installed; pip install 'overlaprl_ray[bench]'")
            from trl_arm import trl_settings  # an extra, and seconds of imports

            threads = sorted(set(args.trl_threads))
            if config.model.dtype == "bfloat16":
                kinds = ["autocast"] if learning else ["autocast", "weights"]
            for kind in kinds:
                trl_settings(config, kind, config.grpo.num_steps)
        jobs += [Job(arm, n, kind, config, **learning) for kind in kinds for n in threads]
    return sorted(jobs, key=lambda job: job.arm == "trl") if learning else jobs


def never_ending(folder: Path, into: Path) -> Path:
    """A copy of a model's folder whose end of text has an id beyond the model's vocabulary: no completion ends early.

    Weights are linked, not copied.
    """
    from transformers import AutoConfig, GenerationConfig

    from overlaprl_ray.models.loading import load_tokenizer

    into.mkdir(parents=True)
    for weights in folder.glob("*.safetensors*"):
        (into / weights.name).symlink_to(weights.absolute())
    tokenizer, config = load_tokenizer(str(folder)), AutoConfig.from_pretrained(folder)
    size = config.get_text_config().vocab_size
    tokenizer.add_tokens([f"<unused {i}>" for i in range(len(tokenizer), size)])
    tokenizer.add_special_tokens({"eos_token": NEVER})
    assert tokenizer.eos_token_id >= size
    tokenizer.save_pretrained(into)
    config.eos_token_id = -1  # a token that there is not, or the run is refused: its completions cannot end
    config.save_pretrained(into)
    GenerationConfig(pad_token_id=tokenizer.pad_token_id).save_pretrained(into)
    return into


# ---- from tracks to a table ----


def figures_of(track: dict[str, Any], rows: int, warm_up: int, target: float | None) -> dict[str, Any]:
    """Seconds per step, samples/s over the steady steps, memory, accuracies, seconds until `target` was reached."""
    ends = [0.0, *track["ends"]]
    steady = ends[warm_up:-1] if len(ends) - warm_up > 3 else ends
    curve = [(ends[step], accuracy) for step, accuracy in track["evaluations"]]
    reached = next((s for s, accuracy in curve if target is not None and accuracy >= target), None)
    return {
        "step_s": median(b - a for a, b in itertools.pairwise(steady)),
        "samples_per_s": rows * (len(steady) - 1) / (steady[-1] - steady[0]),
        "memory_gb": track["memory_gb"],
        "accuracy_start": curve[0][1] if curve else None,
        "accuracy_final": curve[-1][1] if curve else None,
        "train_s": ends[-1],
        "seconds_to_target": reached,
        "curve": curve,
    }


def summarize(runs: list[dict[str, Any]], figure: str, best: Any) -> list[dict[str, Any]]:
    """`medians` of all figures, a row per arm, and `ratio` = its `figure` over TRL's best."""
    table = medians([run | run["figures"] for run in runs])
    peer = best((row[figure] for row in table if row["arm"] == "trl" and row[figure]), default=None)
    return [{**row, "ratio": row[figure] / peer if peer and row[figure] else None} for row in table]


def show(table: list[dict[str, Any]], about: str) -> None:
    """The table for a terminal, without figures that no arm has."""
    names = ["label", *(n for n in table[0] if n not in ("label", "arm") and not n.endswith("_range"))]
    names = [name for name in names if any(row[name] is not None for row in table)]
    print_table(about, names, [[row[name] for name in names] for row in table])


def main(argv: list[str]) -> None:
    """Parse, then measure, or print what would be measured."""
    config, args = parse_command_line("compare_trl.py", "Side by side with TRL on the same work.", argv, options)
    jobs = jobs_of(config, args)
    if args.work == "speed" and config.grpo.num_steps < args.warm_up + 4:
        raise ConfigError(f"grpo.num_steps = {config.grpo.num_steps}: at least --warm-up {args.warm_up} + 4 are needed")
    folder = Path(config.output.dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-trl-{args.work}").expanduser().absolute()
    from overlaprl_ray.models.tiny import tiny_folder
    from overlaprl_ray.runs.environment import environment
    from overlaprl_ray.runtime.inputs import check_output
    from overlaprl_ray.runtime.preflight import preflight

    task = preflight(config).task
    check_output(str(folder))
    if args.dry_run:
        return print(f"{args.repeats} × {'; '.join(job.label for job in jobs)}")
    name = config.grpo.model_name
    model = tiny_folder(config.model.tiny, task.train) if name == TINY else Path(name).expanduser()
    if args.work == "speed":
        if not model.is_dir():
            raise ConfigError(f"grpo.model_name = '{name}': speed needs the model in a local folder")
        model = never_ending(model, folder / "model")
    runs, seconds = [], None
    for repeat in range(1, args.repeats + 1):
        for job in jobs:
            work = changed(job.config, grpo={"model_name": str(model) if model.is_dir() else name})
            work = work.model_copy(update={"seed": config.seed + repeat - 1})
            limit = seconds if job.arm == "trl" and args.work == "learning" and args.target is None else None
            job = Job(**{**vars(job), "config": work, "seconds": limit})
            print(f"{job.label}, repeat {repeat} of {args.repeats}", flush=True)
            track = measure(job, folder / f"r{repeat}-{len(runs)}")
            seconds = track["ends"][-1] if job.arm != "trl" else seconds
            figures = figures_of(track, config.grpo.batch_rows, args.warm_up, args.target)
            runs.append({"label": job.label, "arm": job.arm, "seed": work.seed, "figures": figures})
    by_speed = args.target is None
    table = summarize(runs, "samples_per_s" if by_speed else "seconds_to_target", max if by_speed else min)
    found = {"work": args.work, "config": config.model_dump(mode="json"), "environment": environment(), "runs": runs}
    (folder / "compare.json").write_text(json.dumps({**found, "table": table}, indent=1) + "\n", encoding="utf-8")
    show(table, f"{args.work}: medians of {args.repeats}; ratio to TRL's best arm")
    print(f"files: {folder}")


if __name__ == "__main__":
    run_script(main)
