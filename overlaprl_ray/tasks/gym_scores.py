"""How `gym:` tasks are judged: by reasoning-gym's own scorers, on the answer that is read out of a completion.

Read is the content of the last `<answer>...</answer>`. Without one, reward `gym` takes the whole completion and
`gym_number` its last number: small models answer in a sentence and know no tags. A task whose answers all are numbers
uses `gym_number`, any other `gym`. Scorers may give part of the marks; only 1.0 counts as right.

    marks(read_number("the sum is 1,064."), task.train[0].columns["gym"])  # 1.0 where 1064 is right
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from overlaprl_ray.tasks.answers import MAX_TEXT, last_number

OPENING, CLOSING = "<answer>", "</answer>"

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
    text = text[-MAX_TEXT:]
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, max(0, end))
    return text[start + len(OPENING) : end].strip() if start >= 0 else None


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


def marks(answer: str | None, item: Item) -> float:
    """What the dataset's scorer gives an answer, 0 to 1; 0 for none, and where the scorer fails or must not look."""
    if answer is None or (item.dataset in EVALUATING and not harmless(answer)):
        return 0.0
    try:
        value = float(dataset_of(item.dataset, item.settings).score_answer(answer[-MAX_TEXT:], dict(item.entry)))
    except Exception:  # scorers are not all made for text that is no answer at all
        return 0.0
    return value if isfinite(value) else 0.0
