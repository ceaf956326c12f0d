"""Make the built-in model anew: the weights that `grpo.model_name: tiny` starts from, in overlaprl_ray/models/builtin.

python scripts/make_builtin_model.py            # half a minute; the bits depend on CPU type and torch build

Committed are the weights of one such run, so that every machine starts from the same. recipe.json beside them says how
they were made and what they can do: mean reward by sampling (temperature 1) and greedy accuracy.
"""

import hashlib
import json
import platform

import torch
import transformers
from transformers import AutoModelForCausalLM

from overlaprl_ray.config import ExperimentConfig, TaskConfig, TinyConfig
from overlaprl_ray.engines.hf import HFEngine
from overlaprl_ray.models.tiny import BUILTIN, save_tiny, tiny_tokenizer
from overlaprl_ray.tasks import Problem, build_task, prompts_of_batch

PROBLEMS = 2048  # for the mean reward


def mean_reward(problems: list[Problem], greedy: bool) -> float:
    """Share of right answers of the packaged model, one per problem."""
    grpo, tokenizer = ExperimentConfig().grpo, tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(BUILTIN)
    engine = HFEngine(model, tokenizer.pad_token_id, [tokenizer.eos_token_id])
    right = 0
    for start in range(0, len(problems), 256):
        part = problems[start : start + 256]
        seeds = None if greedy else [(0, start, row) for row in range(len(part))]
        out = engine.generate([tokenizer(p.prompt)["input_ids"] for p in part], grpo.max_new_tokens, 1.0, seeds)
        texts = [
            tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in zip(out.ids, out.mask, strict=True)
        ]
        right += sum(text == p.answer for text, p in zip(texts, part, strict=True))
    return right / len(problems)


def main() -> None:
    """Train, save, measure, and write the recipe."""
    torch.set_num_threads(1)
    task, shape = build_task(TaskConfig()), TinyConfig()
    save_tiny(shape, task.train, BUILTIN)
    recipe = {
        "made by": "python scripts/make_builtin_model.py",
        "shape and warm start": shape.model_dump(),
        "trained on": f"{len(task.train)} problems of TaskConfig()",
        "sha256": hashlib.sha256((BUILTIN / "model.safetensors").read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, 1 thread",
        "mean reward by sampling": {
            "reward": mean_reward(prompts_of_batch(task.train, 0, 1, PROBLEMS), False),
            "problems": PROBLEMS,
        },
        "greedy accuracy, held out": {"accuracy": mean_reward(task.heldout, True), "problems": len(task.heldout)},
    }
    (BUILTIN / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(recipe, indent=2))


if __name__ == "__main__":
    main()
