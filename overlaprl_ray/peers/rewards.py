"""A reward for measuring speed: it differs between almost any two completions, so every group has a signal to train on.

With a reward that a fresh model never gets, groups would have no signal, and an arm that skips such groups would be
timed at doing nothing.

    variety(["p"], ["abab"])  # [0.5]
"""

from collections.abc import Sequence
from typing import Any


def variety(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Different characters over all characters of each completion, 0 to 1 (0 for an empty one)."""
    return [len(set(text)) / max(1, len(text)) for text in completions]
