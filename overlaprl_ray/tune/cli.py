"""The command line of `scripts/sweep.py`: a sweep's file, and what is changed about it.

sweep, folder, dry = parse_sweep_command(["tune_configs/smoke.yaml", "--seeds", "0", "1", "--grpo.num_steps", "20"])
"""

from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from overlaprl_ray.config.cli import Parser, add_settings, fields, read_value, suggest
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tune.search_space import KINDS
from overlaprl_ray.tune.spec import Sweep, TuneSettings, load_sweep

ABOUT = (
    "Many runs from one YAML file to one table. Any setting of a run can be given by its dotted name: it then replaces "
    "what the file says, with a value or, as '{grid: [1, 2]}', with values to go through."
)


def parse_sweep_command(argv: list[str]) -> tuple[Sweep, Path, bool]:
    """The sweep, its folder, and whether it is only to be shown. Raises `ConfigError`, one line."""
    settings = {**{f"tune.{name}": field for name, field in fields(TuneSettings)}, **dict(fields())}
    parser = Parser(prog="sweep.py", usage="%(prog)s FILE [options]", description=ABOUT, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="YAML file of the sweep, see tune_configs/")
    parser.add_argument("--dry-run", action="store_true", help="print trials and what they reserve; start nothing")
    parser.add_argument("--dir", metavar="FOLDER", help="the sweep's folder (default: runs/<name of the sweep>)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="run each setting with these seeds")
    parser.add_argument("--serial", action="store_true", help="= --tune.serial true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="= --NAME VALUE")
    add_settings(parser, settings)
    args = parser.parse(argv)
    pairs = [text.partition("=") for text in args.set]
    for name, equals, value in pairs:
        if not equals:
            raise ConfigError(f"--set '{name}': give NAME=VALUE, e.g. --set grpo.lr=1e-5")
        if name not in settings:
            raise ConfigError(f"--set '{name}={value}': unknown setting '{name}'; {suggest(name, list(settings))}")
    texts = {name: value for name, _, value in pairs} | {k: v for k, v in vars(args).items() if k in settings}
    overrides = {name: _value(name, text, settings[name]) for name, text in texts.items()}
    if args.serial:
        overrides["tune.serial"] = True
    sweep = load_sweep(args.file, overrides, args.seeds)
    return sweep, Path(args.dir or f"runs/{sweep.name}").expanduser().absolute(), args.dry_run


def _value(name: str, text: str, field: FieldInfo) -> Any:
    """A setting's value, or the domain it is to go through."""
    is_domain = any(text.lstrip().startswith(f"{{{kind}:") for kind in KINDS)
    return read_value(name, text, None if is_domain else field)
