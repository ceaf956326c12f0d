"""Made-up studies with random numbers: run folders as the recorder writes them, for tests of what reads them."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

from overlaprl_ray.config.cli import build_config, merge
from overlaprl_ray.runs.summary import discard_report

DECISIONS = ("fresh", "stale", "discard")


def rows_of(rng: random.Random, steps: int, start: int = 1) -> list[dict[str, Any]]:
    """Metrics rows with random rewards, times and decisions; discarded steps have no loss."""
    rows, tokens, wall = [], 0, 0.0
    for step in range(start, start + steps):
        tokens += rng.randint(50, 100)
        wall += rng.uniform(0.1, 0.4)
        decision = rng.choice(DECISIONS)
        fractions = {name: 1.0 if name == decision else 0.0 for name in DECISIONS}
        rows.append({
            "step": step, "version": step, "wall_s": wall, "tokens": tokens, "samples": 16 * step,
            "reward": rng.randint(0, 64) / 64, "loss": None if decision == "discard" else rng.gauss(0, 1),
            "staleness/lag": rng.randint(0, 3), "staleness/kl": 10 ** rng.uniform(-3, 0),
            "staleness/decision": decision, "staleness/frac_fresh": fractions["fresh"],
            "staleness/frac_stale": fractions["stale"], "staleness/frac_discarded": fractions["discard"],
            "time/step": 0.25, "memory/learner_gb": 0.5,
        })  # fmt: skip
    return rows


def write_run(
    folder: Path,
    rng: random.Random,
    steps: int = 24,
    status: str | None = "done",
    eval_every: int = 6,
    **settings: Any,
) -> Path:
    """A run folder; `status` None is a run without summary. Settings by dotted name, with "__" for the dot."""
    folder.mkdir(parents=True)
    config = build_config(merge({}, {name.replace("__", "."): value for name, value in settings.items()}))
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    rows = rows_of(rng, steps)
    evals = [
        {"step": step, "version": step, "accuracy": rng.randint(0, 256) / 256, "n": 256}
        for step in range(0, steps + 1, eval_every)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    judged = [
        {"step": row["step"], "lag": row["staleness/lag"], "generate_s": 0.1, "cells": cells_of(rng)} for row in rows
    ]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    if status is not None:
        (folder / "summary.json").write_text(json.dumps(summary_of(rows, evals, judged, status, config.seed)))
    return folder


def cells_of(rng: random.Random) -> list[list[Any]]:
    """A step's cells of decisions.jsonl."""
    return [[rng.randrange(4), rng.randrange(4), rng.randrange(4), rng.choice(DECISIONS), 4] for _ in range(4)]


def summary_of(
    rows: list[dict[str, Any]], evals: list[dict[str, Any]], judged: list[dict[str, Any]], status: str, seed: int
) -> dict[str, Any]:
    """The fields of summary.json that tables use, by plain sums."""
    rewards = [row["reward"] for row in rows]
    return {
        "status": status, "seed": seed, "steps": len(rows), "tokens": rows[-1]["tokens"], "wall_s": rows[-1]["wall_s"],
        "accuracy_start": evals[0]["accuracy"], "accuracy_final": evals[-1]["accuracy"] if status == "done" else None,
        "accuracy_best": max(row["accuracy"] for row in evals),
        "reward_first_10": math.fsum(rewards[:10]) / len(rewards[:10]),
        "reward_last_10": math.fsum(rewards[-10:]) / len(rewards[-10:]),
        "thrown_away": discard_report(judged), "steps_per_s": 3.0 + 0.1 * seed, "overlap_fraction": 0.5,
        "decisions": {name: sum(row["staleness/decision"] == name for row in rows) for name in DECISIONS},
    }  # fmt: skip


def write_sweep(folder: Path, rng: random.Random, settings: list[dict[str, Any]], seeds: int, **more: Any) -> Path:
    """A sweep folder: every setting with every seed."""
    for number, values in enumerate(settings):
        for seed in range(seeds):
            write_run(folder / "trials" / f"t{number:03}{seed}", rng, seed=seed, **values, **more)
    (folder / "sweep.yaml").write_text("name: made\n")
    return folder


def modes(*lags: int) -> list[dict[str, Any]]:
    """The four modes, those that run ahead with each lag."""
    ahead = [{"pipeline__mode": m, "pipeline__lag": lag} for m in ("async", "staleness", "overlap") for lag in lags]
    return [{"pipeline__mode": "sync"}, *ahead]
