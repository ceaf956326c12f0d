r"""Reward functions with TRL's signature, and the one place that calls them.

A reward function is `(prompts, completions, answer, **columns) -> list[float | None]`: a number per completion, or None
where it does not apply. Prompts and completions are strings, or turns (`[{"role": "assistant", "content": ...}]`) where
the data's prompts are turns. `answer` and every other column of the data come as lists of the same length, as does
`completion_ids`; `trainer_state`, `log_extra` and `log_metric` are TRL's. A function gets those that it has a parameter
for, copies that it may change. Your own is named as "package.module:function".

    gsm8k(prompts=["6 * 3 = ?"], completions=["... #### 18"], answer=["18"])  # [1.0]
    total, parts = score(load_rewards(["math", "boxed_format"]), [1.0, 0.1], prompts, completions, {"answer": answers})
"""

import asyncio
import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, isnan, nan
from numbers import Real
from typing import Any

from overlaprl_ray.errors import BadBatch, ConfigError
from overlaprl_ray.tasks.answers import extract_gsm8k_answer, extract_math_answer, last_box, same_answer
from overlaprl_ray.tasks.gym_scores import Item, marks, read_number, read_text
from overlaprl_ray.tasks.problem import did_you_mean

MAX_REWARD = 1e30  # beyond float32, which rewards travel in, lies infinity

Completion = str | Sequence[Mapping[str, Any]]
Rows = Sequence[Any]  # one value per completion
RewardFunction = Callable[..., Any]


class RewardError(BadBatch):
    """A reward function that raised or returned no usable numbers; names the reward, the prompt and the completion."""


def text_of(completion: Completion) -> str:
    """The text that a completion ends with: itself, or the content of its last chat message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


# ---- The built-in rewards: 1.0 or 0.0, never an exception, in a time bounded by `answers.MAX_TEXT` ----


def exact_match(prompts: Rows, completions: Rows, answer: Rows, **columns: Any) -> list[float]:
    """1.0 where the whole completion is the answer, surrounding whitespace aside: neither "92." nor "It is 92" is 92.

    For models that wrap a number in words, use `gsm8k`: it takes the last number of the completion.
    """
    return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def gsm8k(prompts: Rows, completions: Rows, answer: Rows, **columns: Any) -> list[float]:
    """1.0 where the final numbers are exactly equal (see `extract_gsm8k_answer`).

    `answer` is a number or a whole solution.
    """
    found = [extract_gsm8k_answer(text_of(c)) for c in completions]
    return [float(f is not None and f == extract_gsm8k_answer(str(a))) for f, a in zip(found, answer, strict=True)]


def math(prompts: Rows, completions: Rows, answer: Rows, **columns: Any) -> list[float]:
    r"""1.0 where the final expressions mean the same (see `same_answer`); `answer`: an expression or a whole solution.

    Of a completion the last `\boxed{...}` counts, else the number after `####`, else the last number: ask for a box.
    """

    def right(completion: Completion, answer: str) -> bool:
        found, gold = extract_math_answer(text_of(completion)), last_box(answer) or answer.rpartition("####")[2].strip()
        return found is not None and same_answer(found, gold)

    return [float(right(c, str(a))) for c, a in zip(completions, answer, strict=True)]


def boxed_format(prompts: Rows, completions: Rows, **columns: Any) -> list[float]:
    r"""1.0 where the completion has a closed `\boxed{...}` with content, right or wrong."""
    return [float(last_box(text_of(c)) is not None) for c in completions]


def gym(prompts: Rows, completions: Rows, answer: Rows, gym: Sequence[Item], **columns: Any) -> list[float]:
    """The marks, 0 to 1, that reasoning-gym's scorer gives the tagged answer or the whole completion."""
    return [marks(read_text(text_of(c)), item) for c, item in zip(completions, gym, strict=True)]


def gym_number(prompts: Rows, completions: Rows, answer: Rows, gym: Sequence[Item], **columns: Any) -> list[float]:
    """The marks, 0 to 1, that reasoning-gym's scorer gives the tagged answer or the completion's last number."""
    return [marks(read_number(text_of(c)), item) for c, item in zip(completions, gym, strict=True)]


GYM: dict[str, RewardFunction] = {f.__name__: f for f in (gym, gym_number)}  # only for tasks gym:<dataset>
BUILT_IN: dict[str, RewardFunction] = {f.__name__: f for f in (exact_match, gsm8k, math, boxed_format)}
KNOWN = BUILT_IN | GYM
EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "exact_match": str.strip,
    "gsm8k": extract_gsm8k_answer,
    "math": extract_math_answer,
    "boxed_format": last_box,
    "gym": read_text,
    "gym_number": read_number,
}


def extracted(name: str, completion: Completion) -> str | None:
    """The answer that the built-in reward `name` reads in a completion, for logs; None if none, or another reward."""
    return EXTRACTORS[name](text_of(completion)) if name in EXTRACTORS else None


# ---- Loading and calling ----


def _imported(name: str) -> RewardFunction:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's: importing it can raise anything
        raise ConfigError(
            f"task.rewards: {name!r} cannot be imported ({type(error).__name__}: {error}); "
            "put the folder of its module on PYTHONPATH and check that `import` works"
        ) from error
    function: RewardFunction | None = getattr(module, attribute, None)
    if not callable(function):
        near = did_you_mean(attribute, [n for n in vars(module) if callable(getattr(module, n))])
        raise ConfigError(f"task.rewards: {name!r}: {module_name} has no function {attribute!r}{near}")
    return function


def load_rewards(names: Sequence[str]) -> dict[str, RewardFunction]:
    """The functions called `names`, in order: built-in ones or "package.module:function". ConfigError for any other."""
    functions: dict[str, RewardFunction] = {}
    for name in names:
        if name in functions:
            raise ConfigError(f"task.rewards: {name!r} is there twice; name it once and set its task.reward_weights")
        if ":" not in name and name not in KNOWN:
            raise ConfigError(
                f"task.rewards: {name!r} is no built-in reward{did_you_mean(name, list(KNOWN))}"
                '; write "package.module:function" for a function of your own'
            )
        functions[name] = KNOWN[name] if name in KNOWN else _imported(name)
    return functions


def _short(value: Any, limit: int = 200) -> str:
    text = value if isinstance(value, str) else text_of(value)
    return repr(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}")


def parameters_of(function: RewardFunction) -> list[inspect.Parameter]:
    """What a function is called with; of a compiled one, which may not say, anything."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _call(name: str, function: RewardFunction, rows: Mapping[str, Rows], tools: Mapping[str, Any]) -> list[float]:
    """One reward of every completion, checked; NaN where it abstains."""
    prompts, completions = rows["prompts"], rows["completions"]

    def refusal(what: str, row: int) -> RewardError:
        return RewardError(
            f"reward {name!r} {what}; prompt {_short(prompts[row])}; completion {_short(completions[row])}"
        )

    try:
        parameters = parameters_of(function)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {*rows, *tools} if takes_all else {p.name for p in parameters}
        given: dict[str, Any] = {column: values for column, values in rows.items() if column in names}
        if name not in KNOWN:  # it may change what it is given: each row by itself, though groups share their objects
            given = {column: [copy.deepcopy(value) for value in values] for column, values in given.items()}
        values = function(**given, **{tool: value for tool, value in tools.items() if tool in names})
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
    except Exception as error:  # the function is the user's: it can raise anything
        what = f"raised {type(error).__name__}: {error}"
        if len(completions) > 1:  # name the row to blame: the first that fails by itself
            for row in range(len(completions)):
                _call(name, function, {column: values[row : row + 1] for column, values in rows.items()}, tools)
            what += ", though for no completion alone; the batch begins with"
        raise refusal(what, 0) from error
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(completions):
        got = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
        raise refusal(f"returned {got} for {len(completions)} completions, not a list of as many numbers; first", 0)
    for row, value in enumerate(values):
        is_number = isinstance(value, Real) and isfinite(value) and abs(float(value)) <= MAX_REWARD
        if value is not None and not is_number:
            raise refusal(f"returned {value!r:.60}, not a finite number within ±{MAX_REWARD:g} or None", row)
    return [nan if value is None else float(value) for value in values]


def score(
    functions: Mapping[str, RewardFunction],
    weights: Sequence[float] | None,
    prompts: Rows,
    completions: Rows,
    columns: Mapping[str, Rows],
    tools: Mapping[str, Any] | None = None,
) -> tuple[list[float], dict[str, list[float]]]:
    """Rewards of B completions: their weighted sum (B,), and by name the unweighted parts (B,) it is made of.

    `columns` holds `answer` and the other columns of the data, B values each; `weights` one per function (None: 1);
    `tools` what functions get as it is. A part is NaN where its function returned None, and left out of the sum; the
    sum is NaN where all did. RewardError if a function raises, or returns anything but B numbers or None.
    """
    rows = {"prompts": prompts, "completions": completions, **columns}
    parts = {name: _call(name, function, rows, tools or {}) for name, function in functions.items()}
    weighted = list(zip(weights or [1.0] * len(parts), parts.values(), strict=True))
    judged = [[w * part[row] for w, part in weighted if not isnan(part[row])] for row in range(len(completions))]
    return [sum(values) if values else nan for values in judged], parts
