"""Libraries imported without what they can use and we do not.

import_without("transformers.modeling_utils", "scipy")
"""

import importlib
import sys


def import_without(name: str, *hidden: str) -> None:
    """Import a module as if these packages were not installed, which saves their time and memory.

    One that is imported already stays visible, and later imports find them all.
    """
    absent = {package: None for package in hidden if package not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]  # None: not installed
    try:
        importlib.import_module(name)
    finally:
        for package in absent:
            del sys.modules[package]
