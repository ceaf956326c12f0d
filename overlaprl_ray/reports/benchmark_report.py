"""A benchmark's files: benchmark.json, benchmark.csv (a row per run), benchmark.png, and the table on the terminal.

Every one of them says what it was measured on. Knows no Ray.

    write_report(folder, found); console.print(tables(found))
"""

import csv
import json
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

BAR, SYNC_BAR, BOUND = "#0072B2", "#9A9A9A", "#D55E00"  # Okabe and Ito's; sync is the grey that the others are held to


def write_report(folder: Path, found: dict[str, Any]) -> None:
    """Write (or write anew) everything that a benchmark leaves in its folder."""
    text = json.dumps(found, indent=2, allow_nan=False)
    (folder / "benchmark.json").write_text(text + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for row in found["runs"] for name in row))
    about = {"commit": found["environment"]["git_commit"], "cpu": found["environment"]["cpu"]}
    with (folder / "benchmark.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names, *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in found["runs"])
    draw(folder / "benchmark.png", found)


def caption(found: dict[str, Any]) -> list[str]:
    """Hardware, work and commit, in lines of a caption."""
    where, config, versions = found["environment"], found["config"], found["environment"]["versions"]
    grpo, pipeline = config["grpo"], config["pipeline"]
    hardware = " + ".join([f"{where['cpu']}, {where['cpus']} cores", *where["gpus"]])
    micro = grpo["micro_batch_size"]
    threads = config["resources"]["threads"]
    work = (
        f"{grpo['model_name']} on {config['task']['name']}, {grpo['num_prompts_per_step']} prompts × "
        f"{grpo['group_size']} completions of at most {grpo['max_new_tokens']} tokens, micro-batch "
        f"{'off' if micro is None else micro}, beta {grpo['beta']:g}, lag {pipeline['lag']}, "
        f"{threads} thread(s) per actor unless said"
    )
    size = (
        f"{grpo['num_steps']} steps per run, {found['repeats']} interleaved run(s) of each, seeds from {config['seed']}"
    )
    commit = f"commit {(where['git_commit'] or 'unknown')[:10]}"
    return [hardware, work, f"{size}; {commit}, torch {versions['torch']}, ray {versions['ray']}"]


def tables(found: dict[str, Any]) -> Group:
    """What a person reads, 80 columns wide: how fast, then what was learned, then what it was measured on."""
    return Group(_speed(found), "", _learning(found), "", Text("\n".join(_notes(found))))


def _speed(found: dict[str, Any]) -> Table:
    out = _empty("How fast: medians over runs, the range below", "s/step ↓", "speed-up ↑", "efficiency ↑", "steps/s ↑",
                 "tokens/s ↑", "overlap")  # fmt: skip
    for row in found["modes"]:
        several = row["runs"] > 1
        out.add_row(
            row["label"],
            f"{row['step_s']:.3f}" + (_range(row["step_s_min"], row["step_s_max"], 3) if several else ""),
            f"{_number(row['speed_up'])}" + (_range(row["speed_up_min"], row["speed_up_max"], 2) if several else ""),
            _number(row["efficiency"]),
            f"{row['steps_per_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            "-" if row["overlap_fraction"] is None else f"{row['overlap_fraction']:.0%}",
        )
    return out


def _learning(found: dict[str, Any]) -> Table:
    target = found["target_accuracy"]
    late = [] if target is None else [f"s to {target:g} ↓"]
    out = _empty(
        "What was learned, and at what price", "reward ↑", "accuracy ↑", *late, "decisions", "wait s ↓", "GB ↓"
    )
    for row in found["modes"]:
        runs = [run for run in found["runs"] if run["label"] == row["label"]]
        decisions = "/".join(str(sum(run[name] for run in runs)) for name in ("fresh", "stale", "discard"))
        actors = [f"memory/{actor}_gb" for actor in ("generator", "reference", "learner")]
        memory = "/".join(f"{max(run[name] for run in runs):.1f}" for name in actors if name in runs[0])
        out.add_row(
            row["label"],
            f"{row['reward_first_10']:.2f}→{row['reward_last_10']:.2f}",
            f"{_number(row['accuracy_start'])}→{_number(row['accuracy_final'])}",
            *([] if target is None else [_number(row["seconds_to_target"], 1)]),
            decisions,
            f"{row['learner_wait_s']:.2f}/{row['generator_wait_s']:.2f}",
            memory,
        )
    return out


def _empty(title: str, *columns: str) -> Table:
    out = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    out.add_column("\nmode", no_wrap=True)
    for name in columns:
        out.add_column("\n".join(name.rsplit(" ", 1)) if " " in name else f"\n{name}", justify="right", no_wrap=True)
    return out


def _notes(found: dict[str, Any]) -> list[str]:
    notes = [
        "↑ more is better, ↓ less is.",
        "speed-up: over sync. efficiency: bound / measured step time, the bound made of sync's stage times.",
        "overlap: share of training steps during which a later batch is generated.",
        "decisions: steps fresh/stale/discarded, all runs. wait: learner/generator, per step.",
        "GB: most memory of generator/reference/learner.",
    ]
    for row in found["modes"]:
        if row["mode"] == "sync" and row["serial_s"] is not None:
            stages = ", ".join(
                f"{name} {row[name + '_s'] or 0:.3f}" for name in ("generate", "reference", "train", "weights")
            )
            ratio = f"its step takes {row['step_over_serial']:.2f} × their sum"
            notes.append(f"{row['label']}: {stages} s; {ratio} of {row['serial_s']:.3f} s")
    if sum(row["mode"] == "sync" for row in found["modes"]) > 1:
        rivals = [row for row in found["modes"] if row["mode"] != "sync"]
        speeds = ", ".join(f"{row['label']} {row['speed_up_over_fastest_sync']:.2f}" for row in rivals)
        notes.append(f"speed-up over the fastest sync row, whatever its threads: {speeds or '-'}")
    return [*notes, *caption(found)]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _range(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f"\n{low:.{digits}f}–{high:.{digits}f}"


def draw(path: Path, found: dict[str, Any]) -> None:
    """Step time of each mode as bars (median; whiskers: fastest and slowest run), its bound as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: it keeps state that threads would share

    modes = found["modes"]
    height = 0.62 * len(modes) + 1.7
    figure = Figure(figsize=(10, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.16, 1.15 / height, 0.80, 0.62 * len(modes) / height))
    longest = max(row["step_s_max"] for row in modes)
    for place, row in enumerate(modes):
        colour = SYNC_BAR if row["mode"] == "sync" else BAR
        whiskers = [[row["step_s"] - row["step_s_min"]], [row["step_s_max"] - row["step_s"]]]
        axes.barh(place, row["step_s"], height=0.62, color=colour, xerr=whiskers, capsize=4, ecolor="#333333", zorder=2)
        if row["bound_s"] is not None:
            axes.vlines(row["bound_s"], place - 0.38, place + 0.38, color=BOUND, lw=2.5, zorder=3)
        parts = [f"{row['step_s']:.3f} s"]
        if row["speed_up"] is not None and row["label"] != "sync":
            parts.append(f"{row['speed_up']:.2f}× sync's speed")
        if row["efficiency"] is not None and row["lag"] > 0:
            parts.append(f"{row['efficiency']:.0%} of the bound")
        end = max(row["step_s_max"], row["bound_s"] or 0.0)
        axes.text(end + 0.015 * longest, place, ", ".join(parts), va="center", fontsize=9, color="#333333")
    axes.set_yticks(range(len(modes)), [row["label"] for row in modes], fontsize=10)
    axes.set_ylim(len(modes) - 0.5, -0.5)
    axes.set_xlim(0, 1.5 * longest)
    axes.set_xlabel("seconds per step (shorter is better)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", left=False)
    axes.vlines([], 0, 1, color=BOUND, lw=2.5, label="bound: perfect overlap of sync's stages")
    axes.errorbar([], [], xerr=[], color="#333333", capsize=4, ls="", label=f"range over {found['repeats']} runs")
    figure.legend(loc="upper right", ncols=2, frameon=False, fontsize=9, bbox_to_anchor=(0.97, 1.0))
    figure.text(0.01, 1 - 0.22 / height, "Median step time by mode", fontsize=12, fontweight="bold", va="center")
    figure.text(0.01, 0.06 / height, "\n".join(caption(found)), fontsize=7.5, color="#666666", va="bottom")
    figure.savefig(path)
