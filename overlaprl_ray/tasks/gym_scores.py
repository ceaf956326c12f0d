"""The rewards of `gym:` tasks: reasoning-gym's own scorers, on the answer that is read out of a completion.

Read is the content of the last `<answer>...</answer>`. Without one, `gym` takes the whole completion and `gym_number`
its last number: small models answer in a sentence and know no tags. A task whose answers all are numbers uses
`gym_number`, any other `gym`. Scorers may give part of the marks; only 1.0 counts as right.

Example::

    gym_number(prompts, ["the sum is 1,064."], answer=["1064"], gym=[task.train[0].columns["gym"]])  # [1.0]
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from overlaprl_ray.answers import MAX_TEXT, last_number

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

# Datasets whose scorers hand the completion to Python's or sympy's `eval`.
EVALUATING = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
MAX_EVALUATED = 1000  # characters
# Calls of anything but functions of calculus, and what else reaches beyond arithmetic.
_CALL = re.compile(r"(?!(?:a?(?:sin|cos|tan)h?|exp|log|sqrt|Abs)\b)\b[^\W\d]\w*\s*\(")
_BEYOND = re.compile(r"""__|\.\s*[^\W\d]|[\])}'"]\s*\(|<<|>>|!|\\|lambda|:=""")
# Powers that end: to two digits, a fraction of such, a variable, or a short term in one: x**2, y**(3/2), E**(-2*x).
_POWER = re.compile(
    r"""\*\*\s*(?:-?\d{1,2}(?!\d)|[a-df-z]\b|\(\s*-?\d{1,2}(?:\s*/\s*\d{1,2})?\s*\)
    |\((?=[^()]*[a-df-z])(?![^()]*[A-Za-z]{2})(?:(?!\d{3})[^()*])*(?:\*(?!\*)(?:(?!\d{3})[^()*])*)?\))""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Item:
    """What a scorer needs: the dataset's name and parameters (JSON), and the entry it made (question, answer, ...)."""

    dataset: str
    settings: str
    entry: Mapping[str, Any]


@functools.lru_cache(maxsize=8)
def dataset_of(name: str, settings: str) -> Any:
    """reasoning-gym's dataset, made once per process. Raises whatever its own checks raise."""
    import reasoning_gym  # half a second, an optional package

    return reasoning_gym.create_dataset(name, **json.loads(settings))


def tagged(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`, stripped; None without one."""
    found = _TAG.findall(text[-MAX_TEXT:])
    return found[-1].strip() if found else None


def read_text(text: str) -> str:
    """The tagged answer, else the whole text without surrounding white space."""
    found = tagged(text)
    return text.strip() if found is None else found


def read_number(text: str) -> str | None:
    """The tagged answer, else the last number, as it is written but for thousands separators."""
    found = tagged(text)
    return last_number(text) if found is None else found


def harmless(text: str) -> bool:
    """Whether text may go through `eval`: arithmetic, lists and calculus of bounded length, time and memory."""
    repeats = "*" in text and re.search(r"['\"\[]", text)  # 'a' * 10**9
    raised = _POWER.sub("^", text)
    towers = "**" in raised or re.search(r"\^\s*\^", raised) or len(re.findall(r"\)\s*\^", raised)) > 2
    return not (len(text) > MAX_EVALUATED or repeats or towers or _CALL.search(text) or _BEYOND.search(text))


def _score(answer: str | None, item: Item) -> float:
    if answer is None or (item.dataset in EVALUATING and not harmless(answer)):
        return 0.0
    try:
        value = float(dataset_of(item.dataset, item.settings).score_answer(answer[-MAX_TEXT:], dict(item.entry)))
    except Exception:  # scorers are not all made for text that is no answer at all
        return 0.0
    return value if isfinite(value) else 0.0


def gym(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], gym: Sequence[Item], **columns: Any
) -> list[float]:
    """The scorer's marks, 0 to 1, of the tagged answer or the whole completion."""
    return [_score(read_text(text), item) for text, item in zip(completions, gym, strict=True)]


def gym_number(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], gym: Sequence[Item], **columns: Any
) -> list[float]:
    """The scorer's marks, 0 to 1, of the tagged answer or the last number of the completion."""
    return [_score(read_number(text), item) for text, item in zip(completions, gym, strict=True)]
