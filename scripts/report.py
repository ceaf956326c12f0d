"""Tables, figures and a page of runs or sweeps.

python scripts/report.py runs/modes                                        # a sweep, a run, or a folder of either
python scripts/report.py runs/rules --baseline rule=none,lag=1 --target 0.6
python scripts/report.py runs/study_e0 --save analysis/results/e0          # compact tables of a sweep, to be committed
python scripts/report.py runs/before runs/after --compare                  # the second against the first
"""

import shlex
import sys
from pathlib import Path

from overlaprl_ray.config.cli import run_script
from overlaprl_ray.reports.cli import parse_report_command


def main(argv: list[str]) -> None:
    """Parse, load, print the table, write the page, and say where it is."""
    args = parse_report_command(argv)
    from rich.console import Console  # only now: a slip should not wait for tables and figures

    from overlaprl_ray.reports.comparison import find_setting
    from overlaprl_ray.reports.loading import load, save
    from overlaprl_ray.reports.report import write_comparison, write_report
    from overlaprl_ray.reports.tables import notes, terminal_table

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 2000)  # a file holds whole tables
    command = f"python scripts/report.py {shlex.join(argv)}"
    groups = [load(folder) for folder in args.folders] if args.compare else [load(*args.folders)]
    baseline = find_setting(groups[0], args.baseline) if args.baseline else None
    out = Path(args.out) if args.out else Path(args.folders[0]) / "report"
    for results in groups:
        title, width = str(results.trials["source"].iloc[0]), console.width if console.is_terminal else None
        console.print(terminal_table(results, title, args.target, width))
        for note in notes(results, args.target):
            console.print(f"- {note}", highlight=False, markup=False)
    if args.save:
        save(groups[0], args.save, compact=True)
    if args.compare:
        page = write_comparison(*groups, out, command=command)
    else:
        page = write_report(*groups, out, baseline=baseline, target=args.target, command=command)
    console.print(f"page: {page}\ntables: {page.parent / 'tables'}", highlight=False, markup=False)


if __name__ == "__main__":
    run_script(main)
