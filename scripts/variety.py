"""A reward for measuring speed: it differs between almost any two completions, so every group has a signal.

With a reward that a fresh model never gets, a trainer that skips groups without signal would be timed at doing nothing.

    variety(["p"], ["abab"])  # [0.5]
"""

from collections.abc import Sequence
from typing import Any


def variety(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Different characters over all characters of each completion, 0 to 1 (0 for an empty one)."""
    return [len(set(text)) / max(1, len(text)) for text in completions]
