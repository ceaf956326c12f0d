"""The three workers, assembled from a configuration; actors and the serial replay build them alike.

sampler = build_sampler(config, task); learner = build_learner(config, task)
"""

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.engines.hf import HFEngine
from overlaprl_ray.learner import Learner
from overlaprl_ray.models import eos_ids, load_model, load_tokenizer
from overlaprl_ray.reference import Reference
from overlaprl_ray.sampler import Sampler
from overlaprl_ray.tasks import Task


def build_sampler(
    config: ExperimentConfig, task: Task, device: str = "cpu", share: tuple[int, int] = (0, 1)
) -> Sampler:
    """A generator's insides; `share` is (its index, how many there are)."""
    model = load_model(config, config.grpo.model_name, task, device)
    tokenizer = load_tokenizer(config.grpo.model_name)
    engine = HFEngine(model, tokenizer.pad_token_id, eos_ids(model.config, tokenizer, model.generation_config))
    return Sampler(config, task, tokenizer, engine, share)


def build_reference(config: ExperimentConfig, task: Task, device: str = "cpu") -> Reference:
    """The reference actor's insides."""
    return Reference(config, load_model(config, config.model.reference or config.grpo.model_name, task, device))


def build_learner(config: ExperimentConfig, task: Task, device: str = "cpu") -> Learner:
    """The learner actor's insides."""
    return Learner(config, load_model(config, config.grpo.model_name, task, device))
