"""Many runs from one YAML file to one table.

python scripts/sweep.py tune_configs/smoke.yaml
python scripts/sweep.py tune_configs/thresholds.yaml --dry-run
python scripts/sweep.py tune_configs/rules.yaml --seeds 0 1 2 --grpo.num_steps 100 --tune.max_concurrent 2

The same command again goes on with what is not finished; more seeds or values only add trials.
"""

import sys

from overlaprl_ray.config.cli import run_script
from overlaprl_ray.tune.cli import parse_sweep_command


def main(argv: list[str]) -> None:
    """Parse, then run or print the plan."""
    sweep, folder, dry = parse_sweep_command(argv)
    from rich.console import Console  # only now: a slip should not wait for torch and Ray

    from overlaprl_ray.tune.plan import dry_run
    from overlaprl_ray.tune.run import run_sweep

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)  # a log file holds whole tables
    (dry_run if dry else run_sweep)(sweep, folder, console)


if __name__ == "__main__":
    run_script(main)
