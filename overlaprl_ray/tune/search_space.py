"""What a sweep varies: the `search` block of its file, checked, and the points it expands to.

Distributions are Ray Tune's own: {loguniform: [1e-5, 1e-3]} is `tune.loguniform(1e-5, 1e-3)`.

    space = parse_search({"grpo.lr": {"loguniform": [1e-5, 1e-3]}, "seed": {"grid": [0, 1]}})
    [point.settings for point in space.points(samples=3, seed=0)]
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PositiveFloat, TypeAdapter, ValidationError

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import fields, merge, suggest
from overlaprl_ray.errors import ConfigError

CASES = "cases"
RANGES: dict[str, tuple[Any, str]] = {  # what the bounds must be
    "uniform": (tuple[float, float], "two numbers"),
    "loguniform": (tuple[PositiveFloat, PositiveFloat], "two numbers above 0"),
    "randint": (tuple[int, int], "two whole numbers"),
}
KINDS = ("grid", "choice", *RANGES)
SHAPES = "{grid: [a, b]}, {choice: [a, b]}, {uniform: [low, high]}, {loguniform: [low, high]} or {randint: [low, high]}"

Entry = Any  # a domain, {kind: values}, or in a case also a fixed value


@dataclass(frozen=True)
class Point:
    """One combination: settings by dotted name, and the case they belong to."""

    settings: dict[str, Any]
    case: str | None = None

    def __str__(self) -> str:
        case = f"{self.case}: " if self.case else ""
        values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in self.settings.items()}
        return case + (", ".join(f"{name}={value}" for name, value in values.items()) or "base")


@dataclass(frozen=True)
class SearchSpace:
    """Domains of the settings that all cases share, and each case's own settings, fixed or with domains."""

    shared: dict[str, Entry]
    cases: dict[str, dict[str, Entry]]

    @property
    def random(self) -> bool:
        """Whether anything is drawn."""
        entries = itertools.chain(self.shared.values(), *(case.values() for case in self.cases.values()))
        return any(is_domain(entry) and "grid" not in entry for entry in entries)

    def points(self, samples: int, seed: int) -> Iterator[Point]:
        """Every draw × case × grid point, the run's `seed` slowest, so that a sweep cut short has whole designs.

        Draw j gives a setting the same value in every grid point (comparisons are paired) and whatever `samples` is
        (more samples only add trials).
        """
        seeds = self.shared.get("seed", {}).get("grid", [None])
        for run_seed, draw, (case, own) in itertools.product(seeds, range(samples), (self.cases or {"": {}}).items()):
            entries = {**self.shared, **own, **({} if run_seed is None else {"seed": run_seed})}
            values = [_values(name, entry, [seed, draw]) for name, entry in entries.items()]
            for combination in itertools.product(*values):
                yield Point(dict(zip(entries, combination, strict=True)), case or None)


def _values(name: str, entry: Entry, seed: list[int]) -> list[Any]:
    """A setting's values in one draw."""
    if not is_domain(entry):
        return [entry]
    if "grid" in entry:
        values: list[Any] = entry["grid"]
        return values
    return [tune_domain(entry).sample(random_state=np.random.default_rng([*seed, zlib.crc32(name.encode())]))]


def is_domain(entry: Entry) -> bool:
    """Whether an entry is a domain rather than the setting's value: no setting is a mapping."""
    return isinstance(entry, dict)


def tune_domain(domain: dict[str, list[Any]]) -> Any:
    """A checked domain as Ray Tune's own."""
    from ray import tune  # not at the top: a typo in a sweep's file should not wait for this import

    ((kind, values),) = domain.items()
    match kind:
        case "grid":
            return tune.grid_search(values)
        case "choice":
            return tune.choice(values)
    return getattr(tune, kind)(*values)


# ---- from YAML ----


def parse_search(search: Mapping[str, Any]) -> SearchSpace:
    """The `search` block: dotted names with their domains, and `cases`. Raises `ConfigError`."""
    shared = {name: parse_domain(name, value, "search") for name, value in search.items() if name != CASES}
    cases = search.get(CASES, [])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError(f"search.{CASES} = {cases!r:.60}: give a list of mappings, each with a name and its settings")
    parsed: dict[str, dict[str, Entry]] = {}
    for number, case in enumerate(cases, 1):
        where = f"search.{CASES}[{number}]"
        settings = {setting: value for setting, value in case.items() if setting != "name"}
        for setting, value in settings.items():
            _check_name(setting, where, also="name")
            if setting in shared:
                raise ConfigError(f"{where}.{setting}: is given in search too; keep one of the two")
            if is_domain(value):
                settings[setting] = parse_domain(setting, value, where)
            else:
                _check_value(setting, value, f"{where}.{setting}")
        name = case.get("name")
        if not isinstance(name, str) or not name or name in parsed:
            raise ConfigError(f"{where}.name = {name!r:.60}: give every case a name of its own")
        parsed[name] = settings
    return SearchSpace(shared, parsed)


def parse_domain(name: str, value: Any, where: str) -> dict[str, list[Any]]:
    """One setting's domain, with every value it can take checked against the setting's own limits."""
    _check_name(name, where, also=CASES)
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(f"{where}.{name} = {value!r:.60}: give {SHAPES}; a fixed value belongs in base")
    ((kind, values),) = value.items()
    if kind not in KINDS:
        raise ConfigError(f"{where}.{name}: unknown key '{kind}'; {suggest(str(kind), list(KINDS))}")
    where = f"{where}.{name}.{kind}"
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where} = {values!r:.60}: give a list with at least one value")
    if kind in RANGES:
        values = _bounds(values, kind, where)
    for item in (values[0], values[1] - 1) if kind == "randint" else values:
        _check_value(name, item, where)
    return {kind: values}


def _check_name(name: Any, where: str, also: str) -> None:
    settings = [setting for setting, _ in fields()]
    if name not in settings:
        raise ConfigError(f"{where}: unknown setting '{name}'; {suggest(str(name), [*settings, also])}")
    if name.startswith("output."):
        raise ConfigError(f"{where}.{name}: says where a run writes, not what it computes; give it in base")


def _bounds(values: list[Any], kind: str, where: str) -> list[Any]:
    """Both bounds as numbers: YAML reads 1e-4 (no dot) as a string."""
    shape, expected = RANGES[kind]
    try:
        low, high = TypeAdapter(shape).validate_python(values)
    except ValidationError:
        low = high = 0
    if low >= high:
        raise ConfigError(f"{where} = {values!r:.60}: give {expected}, the lower first")
    return [low, high]


def _check_value(name: str, value: Any, where: str) -> None:
    """Refuse what the setting alone would refuse; a value that conflicts with other settings shows per trial."""
    try:
        ExperimentConfig.model_validate(merge({}, {name: value}))
    except ValidationError as error:
        own = [e for e in error.errors() if e["loc"][: name.count(".") + 1] == tuple(name.split("."))]
        if own:
            message = own[0]["msg"][:1].lower() + own[0]["msg"][1:]
            expected = dict(fields())[name].description
            raise ConfigError(f"{where} = {value!r:.60}: {message}; expected: {expected}") from None
