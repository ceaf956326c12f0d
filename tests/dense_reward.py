"""Rewards that an untrained model can earn: every group has signal from the first step on."""

import os
import time
import zlib


def digits(prompts, completions, answer, **columns):
    """The share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def restless(prompts, completions, answer, **columns):
    """A reward that no policy masters, so that every batch of a long run moves the weights.

    DRILL_PACE_S seconds long: a run of half an hour need not keep two cores busy all the time.
    """
    time.sleep(float(os.environ.get("DRILL_PACE_S", "0")))
    return [zlib.crc32(f"{p}{c}".encode()) % 16 / 16 for p, c in zip(prompts, completions, strict=True)]
