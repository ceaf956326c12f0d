"""Rewards that an untrained model can earn: every group has signal from the first step on."""

import zlib


def digits(prompts, completions, answer, **columns):
    """The share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def restless(prompts, completions, answer, **columns):
    """A reward that no policy masters, so that every batch of a long run moves the weights."""
    return [zlib.crc32(f"{p}{c}".encode()) % 16 / 16 for p, c in zip(prompts, completions, strict=True)]
