"""Many runs from one YAML file to one table.

python scripts/sweep.py tune_configs/smoke.yaml
python scripts/sweep.py tune_configs/thresholds.yaml --dry-run
python scripts/sweep.py tune_configs/rules.yaml --seeds 0 1 2 --grpo.num_steps 100 --tune.max_concurrent 2

The same command again resumes what is not finished; more seeds or values only add trials.
"""

import sys
from pathlib import Path

from rich.console import Console

from overlaprl_ray.config.cli import run_script
from overlaprl_ray.errors import RunError
from overlaprl_ray.tune.cli import parse_sweep_command


def main(argv: list[str]) -> None:
    """Parse, then run and show the tables, or print the plan."""
    sweep, folder, dry = parse_sweep_command(argv)
    from overlaprl_ray.tune.run import dry_run, run_sweep  # only now: a typo should not wait for torch and Ray

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 2000)  # a log file holds whole tables
    if dry:
        return dry_run(sweep, folder, console)
    try:
        run_sweep(sweep, folder, console)
    except RunError:  # some trials failed or are not finished: the others count all the same
        show_tables(folder, console)
        raise
    show_tables(folder, console)


def show_tables(folder: Path, console: Console) -> None:
    """Write the tables of everything in a sweep's folder and print the one of its settings."""
    from overlaprl_ray.reports.loading import load, save
    from overlaprl_ray.reports.tables import markdown, terminal_table

    if not any((folder / "trials").iterdir()):
        return
    results = load(folder)
    save(results, folder)
    (folder / "report.md").write_text(markdown(results), encoding="utf-8")
    console.print(terminal_table(results, width=console.width if console.is_terminal else None))
    for line in [f"tables: {folder}/trials.parquet, history.parquet, report.md", *results.problems]:
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    run_script(main)
