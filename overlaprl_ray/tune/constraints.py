"""Conditions on settings, as a sweep's YAML states them: comparisons of dotted names, with `and`, `or`, `not`, `in`.

Constraint("staleness.kl_fresh < staleness.kl_stale").holds({"staleness.kl_fresh": 0.1, "staleness.kl_stale": 0.3})
Constraint("pipeline.mode != 'sync' or pipeline.lag == 0")
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from overlaprl_ray.config.cli import fields, suggest
from overlaprl_ray.errors import ConfigError

COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, group: value in group,
    ast.NotIn: lambda value, group: value not in group,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
HINT = "write e.g. staleness.kl_fresh < staleness.kl_stale, or pipeline.mode != 'sync' or pipeline.lag == 0"


class Constraint:
    """One condition, parsed and checked when it is made; nothing in it is ever executed as Python."""

    def __init__(self, text: str):
        self.text = text
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            raise ConfigError(f"constraints: '{text}' is not a condition; {HINT}") from None
        self.names: set[str] = set()
        self._check(self.tree)
        if not self.names:
            raise ConfigError(f"constraints: '{text}' names no setting; {HINT}")

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether settings (by dotted name) fulfil it. Raises `ConfigError` where they cannot be compared."""
        try:
            return bool(self._value(self.tree, values))
        except (TypeError, ZeroDivisionError) as error:
            seen = ", ".join(f"{name} = {values[name]!r}" for name in sorted(self.names))
            raise ConfigError(f"constraints: '{self.text}' cannot be decided for {seen} ({error})") from None

    def _check(self, node: ast.expr) -> None:
        """Refuse whatever `_value` does not know; collect the settings' names."""
        match node:
            case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                inside = parts
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
                inside = [part]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                inside = [left, right]
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARE for op in ops):
                inside = [left, *others]
            case ast.Constant():
                inside = []
            case ast.Name() | ast.Attribute():
                inside = []
                self._check_name(ast.unparse(node))
            case _:
                raise ConfigError(f"constraints: '{self.text}': '{ast.unparse(node)}' is not allowed; {HINT}")
        for part in inside:
            self._check(part)

    def _check_name(self, name: str) -> None:
        known = [known for known, _ in fields()]
        if name not in known:
            near = suggest(name, known) if "." in name else f"{suggest(name, known)} (a text stands in quotes)"
            raise ConfigError(f"constraints: '{self.text}': unknown setting '{name}'; {near}")
        self.names.add(name)

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(self._value(part, values) for part in parts)
            case ast.BoolOp(values=parts):
                return any(self._value(part, values) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return not self._value(part, values)
            case ast.UnaryOp(operand=part):
                return -self._value(part, values)
            case ast.BinOp(left=left, op=op, right=right):
                return ARITHMETIC[type(op)](self._value(left, values), self._value(right, values))
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self._value(side, values) for side in (left, *others)]
                return all(COMPARE[type(op)](a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False))
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, values) for part in parts]
            case ast.Constant(value=value):
                return value
        return values[ast.unparse(node)]
