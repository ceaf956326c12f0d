"""The three workers, assembled from a configuration and their model's folder; actors and the serial replay build alike.

models = find_models(config, task.train)
sampler, learner = build_sampler(config, task, models.policy), build_learner(config, models.policy)
"""

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.engines.base import Engine
from overlaprl_ray.engines.hf import HFEngine
from overlaprl_ray.models.loading import eos_ids, load_model, load_tokenizer
from overlaprl_ray.models.lora import add_adapter
from overlaprl_ray.tasks import Task
from overlaprl_ray.workers.generator import Sampler, encode
from overlaprl_ray.workers.learner import Learner
from overlaprl_ray.workers.reference import Reference


def build_sampler(
    config: ExperimentConfig,
    task: Task,
    folder: str,
    device: str = "cpu",
    memory: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Sampler:
    """A generator's insides; `memory` is what it may take of a GPU, bytes, `share` (its index, how many there are)."""
    tokenizer = load_tokenizer(folder, config.task.date)
    engine: Engine
    if config.model.engine == "vllm":
        engine = _build_vllm(config, task, folder, tokenizer, memory)
    else:
        model = load_model(folder, config.model.dtype, device)
        if config.model.lora_r:
            add_adapter(config.model, config.seed, model)
        engine = HFEngine(model, tokenizer.pad_token_id, eos_ids(model.config, tokenizer, model.generation_config))
    return Sampler(config, task, tokenizer, engine, share)


def _build_vllm(
    config: ExperimentConfig, task: Task, folder: str, tokenizer: PreTrainedTokenizerBase, memory: int
) -> Engine:
    """vLLM with room for the task's longest prompt and a completion; whatever ends a completion for the other does."""
    from overlaprl_ray.engines.vllm import VLLMEngine

    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # few models come without
        generation = None
    ends = eos_ids(AutoConfig.from_pretrained(folder, trust_remote_code=False), tokenizer, generation)
    problems = (*task.train, *task.heldout)
    longest = max(len(encode(tokenizer, problem.asked, config.task.system_prompt)) for problem in problems)
    return VLLMEngine(
        folder, config.model.dtype, tokenizer.pad_token_id, ends, longest + config.grpo.max_new_tokens, memory
    )


def build_reference(
    config: ExperimentConfig, folder: str, device: str = "cpu", learner: Learner | None = None
) -> Reference:
    """The reference actor's insides; or, where `config.learner_scores`, the `learner`'s own model as its base."""
    if config.learner_scores:
        assert learner is not None
        return Reference(config, learner.model, learner.adapter)
    return Reference(config, load_model(folder, config.model.dtype, device))


def build_learner(config: ExperimentConfig, folder: str, device: str = "cpu") -> Learner:
    """The learner actor's insides."""
    learner = Learner(config, load_model(folder, config.model.dtype, device))
    if not learner.optimizer.shared:
        learner.optimizer.start_from(load_model(folder))
    return learner
