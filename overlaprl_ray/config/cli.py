"""From a YAML file and dotted overrides to an `ExperimentConfig`; every mistake is one line.

config, args = parse_command_line("train.py", "One GRPO run.", ["--pipeline.mode", "sync", "--grpo.lr", "1e-5"])
"""

import argparse
import copy
import difflib
import itertools
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.grpo import TINY_DEFAULTS
from overlaprl_ray.config.yaml_settings import load_yaml, nested
from overlaprl_ray.errors import ConfigError, RunError

Model = TypeVar("Model", bound=BaseModel)


def fields(model: type[BaseModel] = ExperimentConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as (dotted name, field), in reading order."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def suggest(name: str, known: list[str]) -> str:
    """'did you mean X?' where something near is known, in whole or by its last part, else how to list what there is."""
    by_leaf = {other.rpartition(".")[2]: other for other in reversed(known)}
    leaves = difflib.get_close_matches(name.rpartition(".")[2], by_leaf, n=1, cutoff=0.8)
    near = difflib.get_close_matches(name, known, n=1)
    if leaves and not difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        near = [by_leaf[leaves[0]]]
    return f"did you mean '{near[0]}'?" if near else "--help lists all settings"


def build_config(values: dict[str, Any], source: str = "config") -> ExperimentConfig:
    """Validate nested values. Raises `ConfigError`: one line with field, value and remedy."""
    return validate(ExperimentConfig, values, source)


def validate(model: type[Model], values: dict[str, Any], source: str) -> Model:
    """Validate nested values of any closed model, with the same messages."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error, model)}") from None


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    first, *more = error.errors()
    dotted = ".".join(str(part) for part in first["loc"])
    known = dict(fields(model))
    if first["type"] == "extra_forbidden":
        groups = sorted({name.rsplit(".", i)[0] for name in known for i in range(1, name.count(".") + 1)})
        text = f"{dotted}: unknown setting (value {_short(first['input'])}); {suggest(dotted, [*known, *groups])}"
    elif first["type"] == "value_error":
        text = f"{dotted}.{first['ctx']['error']}".lstrip(".")  # a check of two settings begins with a setting's name
    else:
        name = next((n for n in known if dotted == n or dotted.startswith(n + ".")), dotted)
        remedy = known[name].description if name in known else "a mapping of settings, see --help"
        problem = first["msg"][:1].lower() + first["msg"][1:]
        text = f"{dotted or 'settings'} = {_short(first['input'])}: {problem}; expected: {remedy}"
    return text + (f" (and {len(more)} more)" if more else "")


def _short(value: Any) -> str:
    """At most 60 characters, whatever a YAML file nests or repeats by reference."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = "a very long integer"
    return text if len(text) <= 60 else text[:57] + "..."


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file. Raises `ConfigError` with file and line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = load_yaml(text)
    except OSError as error:
        raise ConfigError(f"config file '{path}': {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file '{path}': not UTF-8 text; give the path of a YAML file") from None
    except Exception as error:  # beyond its own errors PyYAML lets out others, as for `!!int ""` or a 40th of May
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" line {line + 1}" if line is not None else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"config file '{path}'{where}: {problem}; correct the YAML") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file '{path}': holds {_short(values)}, not a mapping of settings; see --help")
    return values


def merge(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Nested values with overrides by dotted name laid over them; neither argument is changed.

    Where a group holds no mapping it stays as it is, for the validation to refuse.
    """
    merged = copy.deepcopy(values)
    for dotted, value in overrides.items():
        *groups, name = dotted.split(".")
        node: Any = merged
        for group in groups:
            node = node.setdefault(group, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[name] = value
    return merged


def load_config(path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> ExperimentConfig:
    """The built-in default, or a file's settings, with overrides by dotted name."""
    values = nested(read_yaml(path)) if path else {}
    return build_config(merge(values, overrides or {}), str(path) if path else "command line")


class Parser(argparse.ArgumentParser):
    """Whose errors are one line and exit code 2, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The arguments; an unknown one is refused with the nearest that there is."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].lstrip("-").split("=")[0]
            options = [text.lstrip("-") for action in reversed(self._actions) for text in action.option_strings]
            raise ConfigError(f"command line: unknown argument '{unknown[0]}'; {suggest(name, options)}")
        return args


def parse_command_line(
    script: str, about: str, argv: list[str], extend: Callable[[argparse.ArgumentParser], None] | None = None
) -> tuple[ExperimentConfig, argparse.Namespace]:
    """`--config FILE`, `--dry-run` and every setting by its dotted name; `extend` adds a script's own options.

    With an option `--resume FOLDER` the settings are those of the run in it.
    """
    usage = "%(prog)s [--config FILE] [--dry-run] [--group.name VALUE ...]"
    parser = Parser(prog=script, usage=usage, description=about, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, nested as the names below")
    parser.add_argument("--dry-run", action="store_true", help="print configuration and resource plan; start nothing")
    if extend:
        extend(parser)
    known = dict(fields())
    add_settings(parser, known)
    args = parser.parse(argv)
    given = {name: read_value(name, text, known[name]) for name, text in vars(args).items() if name in known}
    folder = vars(args).get("resume")
    if folder is None:
        return load_config(args.config, given), args
    for other in ("config", "output.dir"):
        if vars(args).get(other):
            raise ConfigError(f"--resume {folder}: --{other} cannot be given with it; the folder says both")
    return load_config(Path(folder) / "config.yaml", {**given, "output.dir": folder}), args


def add_settings(parser: argparse.ArgumentParser, known: Mapping[str, FieldInfo]) -> None:
    """An option for each setting, by its dotted name, with its default in the help; one not given is left out."""
    for title, names in itertools.groupby(known, lambda name: name.rpartition(".")[0] or "run"):
        group = parser.add_argument_group(title)
        for name in names:
            group.add_argument(f"--{name}", metavar="V", help=_help(name, known[name]), default=argparse.SUPPRESS)


def _help(name: str, field: FieldInfo) -> str:
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    defaults = {"default": field.get_default(call_default_factory=True)}
    if (leaf := name.removeprefix("grpo.")) in TINY_DEFAULTS:
        defaults["built-in model"] = TINY_DEFAULTS[leaf]
    shown = "; ".join(f"{of}: {'null' if value is None else value}" for of, value in defaults.items())
    return f"{' | '.join(choices)}{': ' if choices else ''}{field.description} ({shown})".replace("%", "%%")


def read_value(name: str, text: str, field: FieldInfo | None) -> Any:
    """A setting's text as YAML; where the setting is a text itself it is taken as it stands, braces, colons and all."""
    kind = field.annotation if field else None
    if kind is str or (kind == str | None and text != "null"):
        return text
    try:
        return load_yaml(text)
    except Exception:  # see read_yaml
        raise ConfigError(f"--{name} {_short(text)}: not a YAML value; quote it, e.g. '[a, b]' or null") from None


def run_script(main: Callable[[list[str]], None]) -> NoReturn:
    """Run a script's main: a known error is one line on stderr and its exit code, never a traceback."""
    try:
        main(sys.argv[1:])
    except (ConfigError, RunError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; what was written so far is in the run's folder", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
