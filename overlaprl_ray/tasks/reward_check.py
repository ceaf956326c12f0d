"""Whether the rewards of a run can be earned at all, asked before it starts.

A built-in reward must give each problem's own answer full marks: `math` gives "The answer is 2." none, as it compares
with the whole text. A function of your own must find the columns that it has parameters for.

    task = check_rewards(build_task(config.task), config.task)    # ConfigError; or the task, with notices
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import RESERVED, Problem, Task, columns_of
from overlaprl_ray.tasks.answers import parse_number
from overlaprl_ray.tasks.rewards import KNOWN, RewardFunction, load_rewards, parameters_of, score

LOOKED_AT = 512  # problems at most, a quarter of them held out


def check_rewards(task: Task, config: TaskConfig) -> Task:
    """The task, with notices about answers that a reward does not accept. ConfigError where it accepts none."""
    problems = [*task.heldout[: LOOKED_AT // 4], *task.train[: LOOKED_AT - LOOKED_AT // 4]]
    notices = []
    for name, function in load_rewards(task.rewards).items():
        if name not in KNOWN:
            _check_parameters(name, function, problems)
        elif name != "boxed_format" and (notice := _own_answers(name, function, problems, task, config)):
            notices.append(notice)
    return replace(task, notices=(*task.notices, *notices))


def _own_answers(
    name: str, function: RewardFunction, problems: Sequence[Problem], task: Task, config: TaskConfig
) -> str | None:
    """A notice about the problems whose own answer gets less than full marks, None without any; all: ConfigError."""
    boxed = "boxed_format" in task.rewards or r"\boxed" in (config.system_prompt or "")

    def is_right(problem: Problem) -> bool:
        answer, columns = problem.answer, columns_of([problem])
        forms = [rf"\boxed{{{answer}}}"] if boxed or r"\boxed" in str(problem.asked) else []
        # without a box `math` reads numbers alone: comparing other expressions with them would take seconds
        if name != "math" or parse_number(answer) is not None or re.search(r"=|####|\\boxed", answer):
            forms.append(answer)
        return any(score({name: function}, None, [problem.asked], [form], columns)[0][0] >= 1.0 for form in forms)

    problems = [problem for problem in problems if problem.answer]  # a puzzle can have solutions and no answer
    wrong = [problem for problem in problems if not is_right(problem)]
    if not wrong:
        return None
    first = f"{wrong[0].where or repr(wrong[0].prompt[:60])}: answer {wrong[0].answer!r:.80}"
    remedy = "give answers that it can read"
    if name == "math":
        remedy += ": a number alone, or anything whose prompt asks for it in \\boxed{}"
    if len(wrong) == len(problems):
        raise ConfigError(f"task.rewards: {name!r} can give full marks to no answer of the data ({first}); {remedy}")
    share = f"{len(wrong)} of {len(problems)} answers of the data"
    return f"notice: reward {name!r} can never give full marks to {share} ({first}); {remedy}"


def _check_parameters(name: str, function: RewardFunction, problems: Sequence[Problem]) -> None:
    """A parameter without a default must be a column, or what every reward function is offered."""
    offered = RESERVED | columns_of(problems).keys()
    for parameter in parameters_of(function):
        keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if keyword and parameter.default is inspect.Parameter.empty and parameter.name not in offered:
            raise ConfigError(
                f"task.rewards: {name!r} wants the column {parameter.name!r}; the data have "
                f"{', '.join(sorted(offered - RESERVED | {'answer'}))}; rename the column, or give it a default"
            )
