"""Shared by all tests: one cache for built models, one Ray for everything that needs it, small configurations."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.models.folders import find_models
from overlaprl_ray.rollout import Rollout, pad_left

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)  # as the actors' default: bits depend on it


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Built models live for the test session only."""
    os.environ["OVERLAPRL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def local_ray(cache):
    """One local Ray with one (simulated) GPU, so that actors are placed by fractions; torch computes on the CPU."""
    import ray

    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


def small(**groups) -> ExperimentConfig:
    """A run of seconds: 4 x 4 completions, a model barely trained, a reward that gives signal all the same.

    No warm-up: a run this short would end in it.
    """
    shape = {"num_steps": 4, "num_prompts_per_step": 4, "group_size": 4, "lr_warmup_steps": 0}
    grpo = {**shape, **groups.pop("grpo", {})}
    model = {"tiny": {"warm_start_max_steps": 40, "warm_start_batch": 64}, **groups.pop("model", {})}
    task = {"eval_size": 16, "rewards": ["dense_reward:digits"], **groups.pop("task", {})}
    return ExperimentConfig(grpo=grpo, model=model, task=task, **groups)


def policy_of(config, task) -> str:
    """The folder that a run's policy starts from."""
    return find_models(config, task.train).policy


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a run's file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_rollout(prompts, out, **fields) -> Rollout:
    """A rollout from generated tokens, with rewards that differ within groups of two."""
    rows = len(prompts)
    prompt_ids, prompt_mask = pad_left(prompts, 0)
    rewards = torch.tensor([float(row % 2) for row in range(rows)])
    made = {
        "batch": 1, "version": 0, "weights_step": 0,
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask,
        "completion_ids": out.ids, "completion_mask": out.mask, "logprobs": out.logprobs,
        "rewards": rewards, "reward_parts": {"exact_match": rewards}, "advantages": 2 * rewards - 1,
        "groups": torch.arange(rows) // 2, "finished": out.finished,
        "prompts": ["p"] * rows, "completions": ["c"] * rows, "answers": ["a"] * rows, "extracted": [None] * rows,
        "generate": (0.0, 1.0), "load": (0.0, 0.0), "memory_gb": 0.0,
    }  # fmt: skip
    return Rollout(**{**made, **fields})


@pytest.fixture
def rollout_of():
    """`make_rollout`, for tests that need one."""
    return make_rollout
