"""Tasks: where prompts and their answers come from. One module per kind, each with `build(config) -> Task`.

task = build_task(TaskConfig(name="arithmetic", digits=2))
prompts_of_batch(task.train, seed=0, batch=1, count=4)  # the four problems of the first batch
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from overlaprl_ray.config import TaskConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.tasks import arithmetic, gsm8k, gym, records
from overlaprl_ray.tasks.order import prompts_of_batch
from overlaprl_ray.tasks.problem import Problem, Task

__all__ = ["Problem", "Task", "build_task", "columns_of", "prompts_of_batch"]

BUILDERS = {"arithmetic": arithmetic.build, "gsm8k": gsm8k.build, "records": records.build}

# What a reward function is called with besides the columns of the data.
RESERVED = {"prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"}


def build_task(config: TaskConfig) -> Task:
    """The task that `config` describes, with `config.rewards` if it names any. ConfigError for anything wrong."""
    if config.gym and not config.name.startswith(gym.PREFIX):
        raise ConfigError(f"task.gym: task {config.name!r} is none of reasoning-gym's; set task.name to gym:<dataset>")
    task = gym.build(config) if config.name.startswith(gym.PREFIX) else BUILDERS[config.name](config)
    task = replace(task, rewards=tuple(config.rewards)) if config.rewards else task
    if not config.name.startswith(gym.PREFIX) and {"gym", "gym_number"} & set(task.rewards):
        raise ConfigError(f"task.rewards: {', '.join(task.rewards)} cannot judge {config.name}, only gym: tasks")
    return task


def columns_of(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """What reward functions get besides prompts and completions: `answer` and the columns, a value per problem."""
    names = dict.fromkeys(name for problem in problems for name in problem.columns if name not in RESERVED)
    return {
        "answer": [problem.answer for problem in problems],
        **{name: [problem.columns.get(name) for problem in problems] for name in names},
    }
