"""YAML as people write settings: dotted names, merge keys, and integers in the decimal system.

nested(load_yaml("{grpo.lr: 0.001, grpo: {num_steps: 010}}"))    # {"grpo": {"lr": 0.001, "num_steps": 10}}
"""

from typing import Any

import yaml

from overlaprl_ray.errors import ConfigError

DEEPEST = 3  # levels of settings: model.tiny.layers
ASIDE = "x-"  # begins the names of top-level entries that are there for their anchors alone


class _Loader(yaml.SafeLoader):
    """Plain data only. A key given twice is refused, since the second would silently win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.composer.ComposerError(None, None, f"key '{key[1]}' given twice", node.start_mark)
        return node

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """010 is ten, as everybody means it, though octal in YAML 1.1."""
        digits = node.value.lstrip("+-")
        return int(node.value) if digits.isdigit() else self.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def load_yaml(text: str) -> Any:
    """The value of a YAML text. Raises what PyYAML raises."""
    return yaml.load(text, Loader=_Loader)


def nested(values: dict[Any, Any], depth: int = DEEPEST) -> dict[Any, Any]:
    """Settings with their dotted names taken apart, beside groups as they are. `ConfigError` for one given twice."""
    result: dict[Any, Any] = {}
    for name, value in values.items():
        if depth == DEEPEST and str(name).startswith(ASIDE):
            continue
        inner = nested(value, depth - 1) if isinstance(value, dict) and depth > 1 else value
        first, *rest = name.split(".") if isinstance(name, str) else [name]
        for part in reversed(rest):
            inner = {part: inner}
        _add(result, {first: inner}, "")
    return result


def _add(values: dict[Any, Any], more: dict[Any, Any], group: str) -> None:
    for name, value in more.items():
        if name not in values:
            values[name] = value
        elif isinstance(values[name], dict) and isinstance(value, dict):
            _add(values[name], value, f"{group}{name}.")
        else:
            raise ConfigError(f"{group}{name} is given twice, by its dotted name and in its group; leave one out")
