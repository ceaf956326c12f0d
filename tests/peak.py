"""A learner step's peak memory and gradient, in a process of its own, on a model of SmolLM2-135M's shape.

    python tests/peak.py chunked 32 30 /tmp/gradient.pt   # kind, rows per micro-batch, layers, where the gradient goes

`naive` is what one writes first: the logits of every position, prompt and completion, as one B x T x V float32 tensor,
its log_softmax, then a gather. All else is the same in both: gradient checkpointing, losses, optimizer. Prints JSON:
resident memory before the step and its peak in the step, GB (1e9 bytes; /proc/self/status, the peak reset before).
"""

import json
import sys
import time
from pathlib import Path

import torch
from conftest import make_rollout
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.rollout import Rollout, position_ids
from overlaprl_ray.workers import learner as learner_module
from overlaprl_ray.workers.learner import Learner

VOCABULARY, ROWS, PROMPT, TOKENS = 49_152, 32, 16, 256


def smollm2_shape(layers: int) -> LlamaForCausalLM:
    """Randomly initialised: vocabulary 49,152, hidden 576, 9 heads over 3, tied embeddings; 135 M with 30 layers."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape)


def naive_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) by way of all logits."""
    mask = rollout.completion_mask
    attention = torch.cat([rollout.prompt_mask, mask], dim=1)
    logits = model(
        input_ids=torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1),
        attention_mask=attention.long(),
        position_ids=position_ids(attention),
        use_cache=False,
    ).logits
    everything = (logits.float() / temperature).log_softmax(-1)
    predicted = everything[:, -mask.shape[1] - 1 : -1]
    logprobs = predicted.gather(-1, rollout.completion_ids[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = -torch.stack([(row.exp() * row).sum(-1) for row in predicted])
    return torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)


def rollout_of_random_tokens() -> Rollout:
    """32 rows of 16 + 256 tokens with signal."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, VOCABULARY, (ROWS, PROMPT), generator=generator).tolist()
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=generator)
    behaviour = -torch.tensor(float(VOCABULARY)).log() + 0.1 * torch.randn(ROWS, TOKENS, generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    advantages = torch.randn(ROWS, generator=generator)
    return make_rollout(prompts, Generated(ids, mask, behaviour, mask.any(1)), advantages=advantages)


def resident(field: str) -> float:
    """VmRSS (now) or VmHWM (peak), GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e9


def main(kind: str, rows: int, layers: int, gradient: Path) -> None:
    """Measure one step."""
    torch.set_num_threads(1)
    grpo = {"num_prompts_per_step": 16, "group_size": 2, "max_new_tokens": TOKENS, "beta": 0.0, "lr": 1e-6}
    config = ExperimentConfig(
        grpo={**grpo, "micro_batch_size": rows, "max_grad_norm": 1e6, "temperature": 1.0},  # no clipping
        model={"gradient_checkpointing": True},
        pipeline={"mode": "sync"},
    )
    learner = Learner(config, smollm2_shape(layers))
    learner.floor = 0.0  # else a forward more, to measure it
    if kind == "naive":
        learner_module.response_logprobs = naive_logprobs
    rollout = rollout_of_random_tokens()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, started = resident("VmRSS"), time.monotonic()
    metrics = learner.step(rollout).metrics
    peak = resident("VmHWM")
    torch.save(torch.cat([p.grad.flatten() for p in learner.model.parameters()]), gradient)
    print(json.dumps({"before_gb": before, "peak_gb": peak, "seconds": time.monotonic() - started,
                      "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
