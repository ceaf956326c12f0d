"""A reward that an untrained model can earn: every group has signal from the first step on."""


def digits(prompts, completions, answer, **columns):
    """The share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
