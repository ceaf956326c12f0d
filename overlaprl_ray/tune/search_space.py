"""What a sweep varies: values, distributions and named cases, expanded to a fixed list of points. Knows no Ray.

space = parse_search({"grpo.lr": {"grid": [1e-4, 1e-3]}, "seed": {"grid": [0, 1]}})
[point.settings for point in space.points(samples=1, seed=0)]
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from pydantic import ValidationError

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.cli import fields, suggest
from overlaprl_ray.errors import ConfigError

Kind = Literal["grid", "choice", "uniform", "loguniform", "randint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CASES = "cases"
SHAPES = "{grid: [a, b]}, {choice: [a, b]}, {uniform: [low, high]}, {loguniform: [low, high]} or {randint: [low, high]}"


@dataclass(frozen=True)
class Domain:
    """The values of one setting: every one of a list (`grid`), or a draw (from a list, or between two bounds)."""

    kind: Kind
    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        """One value; `randint` leaves out its upper bound, as Tune does."""
        low, high = self.values[0], self.values[-1]
        match self.kind:
            case "uniform":
                return float(rng.uniform(low, high))
            case "loguniform":
                return float(math.exp(rng.uniform(math.log(low), math.log(high))))
            case "randint":
                return int(rng.integers(low, high))
        return self.values[int(rng.integers(len(self.values)))]


@dataclass(frozen=True)
class Point:
    """One combination: settings by dotted name, and the case they belong to."""

    settings: dict[str, Any]
    case: str | None = None


@dataclass(frozen=True)
class SearchSpace:
    """Domains of the settings that all cases share, and each case's own settings, fixed or with domains."""

    shared: dict[str, Domain]
    cases: dict[str, dict[str, Any]]

    @property
    def domains(self) -> list[Domain]:
        """Every domain, wherever it stands."""
        own = [value for case in self.cases.values() for value in case.values() if isinstance(value, Domain)]
        return [*self.shared.values(), *own]

    @property
    def random(self) -> bool:
        """Whether anything is drawn."""
        return any(domain.kind != "grid" for domain in self.domains)

    def points(self, samples: int, seed: int) -> Iterator[Point]:
        """Every draw × case × grid point, the run's `seed` slowest, so that a sweep cut short has whole designs.

        Draw j gives a setting the same value in every grid point (comparisons are paired) and whatever `samples` is
        (more samples only add trials).
        """
        seeds = self.shared.get("seed")
        slowest = seeds.values if seeds and seeds.kind == "grid" else (None,)
        for run_seed, draw, (case, own) in itertools.product(slowest, range(samples), (self.cases or {"": {}}).items()):
            entries = {**self.shared, **own}
            if run_seed is not None and "seed" not in own:
                entries["seed"] = Domain("grid", (run_seed,))
            fixed = {name: _settle(name, value, draw, seed) for name, value in entries.items()}
            for values in itertools.product(*fixed.values()):
                yield Point(dict(zip(fixed, values, strict=True)), case or None)


def _settle(name: str, value: Any, draw: int, seed: int) -> tuple[Any, ...]:
    """A setting's values in one draw."""
    if not isinstance(value, Domain):
        return (value,)
    if value.kind == "grid":
        return value.values
    return (value.draw(np.random.default_rng([seed, draw, zlib.crc32(name.encode())])),)


# ---- from YAML ----


def parse_search(values: Mapping[str, Any]) -> SearchSpace:
    """The `search` block: dotted names with their domains, and `cases`. Raises `ConfigError`."""
    shared = {name: parse_domain(name, value) for name, value in values.items() if name != CASES}
    return SearchSpace(shared, _parse_cases(values.get(CASES, []), shared))


def is_domain(value: Any) -> bool:
    """Whether a value is meant as a domain rather than as the setting's value: no setting is a mapping."""
    return isinstance(value, dict)


def parse_domain(name: str, value: Any, where: str = "search") -> Domain:
    """One setting's domain, with every value it can take checked against the setting's own limits."""
    _check_name(name, where)
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(f"{where}.{name} = {value!r:.60}: give {SHAPES}; a fixed value belongs into base")
    kind, listed = next(iter(value.items()))
    if kind not in KINDS:
        raise ConfigError(f"{where}.{name}: unknown key '{kind}'; {suggest(str(kind), list(KINDS))}")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{where}.{name}.{kind} = {listed!r:.60}: give a list with at least one value")
    values = tuple(_number(name, item) for item in listed)
    if kind in ("uniform", "loguniform", "randint"):
        _check_bounds(f"{where}.{name}.{kind}", kind, values)
    for item in values if kind != "randint" else (values[0], values[1] - 1):
        _check_value(name, item, f"{where}.{name}.{kind}")
    if len({repr(item) for item in values}) < len(values):
        raise ConfigError(f"{where}.{name}.{kind} = {listed!r:.60}: holds a value twice; drop one")
    return Domain(kind, values)


def _parse_cases(cases: Any, shared: dict[str, Domain]) -> dict[str, dict[str, Any]]:
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError(f"search.{CASES} = {cases!r:.60}: give a list of mappings, each with a name and its settings")
    parsed: dict[str, dict[str, Any]] = {}
    for number, case in enumerate(cases, 1):
        for setting in case:
            if setting != "name":
                _check_name(setting, f"search.{CASES}[{number}]", extra=["name"])
        name = case.get("name")
        if not isinstance(name, str) or not name or name in parsed:
            raise ConfigError(f"search.{CASES}[{number}].name = {name!r:.60}: give every case a name of its own")
        parsed[name] = {setting: value for setting, value in case.items() if setting != "name"}
        for setting, value in parsed[name].items():
            where = f"search.{CASES}.{name}"
            if setting in shared:
                raise ConfigError(f"{where}.{setting}: stands in search too; give it in one of the two")
            if is_domain(value):
                parsed[name][setting] = parse_domain(setting, value, where)
            else:
                parsed[name][setting] = _number(setting, value)
                _check_value(setting, value, where)
    return parsed


def _check_name(name: Any, where: str, extra: list[str] | None = None) -> None:
    known = [known for known, _ in fields()]
    if name not in known:
        near = suggest(str(name), [*known, *(extra or []), *([CASES] if where == "search" else [])])
        raise ConfigError(f"{where}: unknown setting '{name}'; {near}")
    if name.startswith("output."):
        raise ConfigError(f"{where}.{name}: says where and how often a run writes, not what it is; give it in base")


def _number(name: str, value: Any) -> Any:
    """YAML reads 1e-4 (without a dot) as a text; where the setting is none, it is a number."""
    field = dict(fields())[name]
    if not isinstance(value, str) or field.annotation in (str, str | None):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _check_bounds(where: str, kind: str, values: tuple[Any, ...]) -> None:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if len(values) != 2 or not numbers or not values[0] < values[1]:
        raise ConfigError(f"{where} = {list(values)!r:.60}: give two numbers, the lower first")
    if kind == "loguniform" and values[0] <= 0:
        raise ConfigError(f"{where} = {list(values)!r:.60}: both bounds must be above 0")
    if kind == "randint" and not all(isinstance(value, int) for value in values):
        raise ConfigError(f"{where} = {list(values)!r:.60}: both bounds must be whole numbers")


def _check_value(name: str, value: Any, where: str) -> None:
    """Refuse what the setting alone would refuse; what depends on other settings shows per trial."""
    nested: Any = value
    for part in reversed(name.split(".")):
        nested = {part: nested}
    try:
        ExperimentConfig.model_validate(nested)
    except ValidationError as error:
        own = [e for e in error.errors() if e["loc"][: name.count(".") + 1] == tuple(name.split("."))]
        if own:
            message = own[0]["msg"]
            remedy = dict(fields())[name].description
            raise ConfigError(
                f"{where} = {value!r:.60}: {message[:1].lower()}{message[1:]}; expected: {remedy}"
            ) from None
