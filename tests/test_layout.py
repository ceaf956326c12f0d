"""A group's prompt computed once gives what a row alone gives: logprobs, entropies and gradients."""

import pytest
import torch
import transformers
from conftest import make_rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from overlaprl_ray.config import TinyConfig
from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.models.layout import Layouts, lay_out
from overlaprl_ray.models.logprobs import response_logprobs, shares_prompts
from overlaprl_ray.models.tiny import tiny_config

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=4)), min_size=1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(TinyConfig())).eval()


def rollout_of(groups, order_seed: int = 0):
    """Rows of groups (prompt length, completion lengths) in random order, with random tokens."""
    generator = torch.Generator().manual_seed(order_seed)
    tokens = torch.tensor([length for _, lengths in groups for length in lengths])
    owner = torch.tensor([group for group, (_, lengths) in enumerate(groups) for _ in lengths])
    asked = [torch.randint(2, 12, (prompt,), generator=generator).tolist() for prompt, _ in groups]
    order = torch.randperm(len(owner), generator=generator)
    width = max(1, int(tokens.max()))
    ids = torch.randint(1, 12, (len(owner), width), generator=generator)
    mask = torch.arange(width) < tokens[order, None]
    made = Generated(ids, mask, torch.zeros(mask.shape), mask.any(1))
    return make_rollout([asked[owner[row]] for row in order], made, groups=owner[order])


def gradients(model, rollout, shared):
    """(logprobs, entropy, gradient) of a random functional of the logprobs."""
    model.zero_grad()
    logprobs, entropy = response_logprobs(model, rollout, 0.7, lay_out(rollout, shared))
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logprobs.detach(), entropy, torch.cat(parts).clone()


def assert_equal(model, rollout, relative: float):
    alone, shared = (gradients(model, rollout, kind) for kind in (False, True))
    for expected, found in zip(alone, shared, strict=True):
        assert (found - expected).abs().max() <= relative * expected.abs().max().clamp(min=1e-6)


@given(GROUPS, st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_any_groups(model, groups, order):
    rollout = rollout_of(groups, order)
    if rollout.completion_mask.any():
        assert_equal(model, rollout, 1e-4)
    layout = lay_out(rollout, True)
    prompts = sum(prompt for prompt, _ in groups)
    assert layout.real_tokens == prompts + sum(max(0, length - 1) for _, lengths in groups for length in lengths)


@pytest.mark.parametrize("variant", ["eager", "checkpointing", "lora", "bfloat16", "gpt2", "mixtral"])
def test_variants(model, variant):
    torch.manual_seed(1)
    kind = {"gpt2": transformers.GPT2Config, "mixtral": transformers.MixtralConfig}.get(variant)
    config = (
        kind(**SHAPE, **({"num_local_experts": 4, "num_key_value_heads": 2} if variant == "mixtral" else {}))
        if kind
        else model.config
    )
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if variant == "eager" else "sdpa")
    if variant == "checkpointing":
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.train()
    if variant == "lora":
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False), made)
    rollout = rollout_of([(5, [3, 7, 1, 4]), (2, [0, 2, 6]), (8, [1, 1])])
    made = made.bfloat16() if variant == "bfloat16" else made
    made = made if variant == "checkpointing" else made.eval()
    assert shares_prompts(made)
    assert_equal(made, rollout, 0.05 if variant == "bfloat16" else 1e-4)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=4096),
        transformers.Gemma3TextConfig(**SHAPE, head_dim=8),
        transformers.GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, eos_token_id=1,
                                  bos_token_id=1, attention_types=[[["global", "local"], 1]]),
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),  # positions from a 2-D mask
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_cannot_share_are_found(config):
    assert not shares_prompts(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_that_ignores_the_mask_is_found(model):
    def blind(module, args, kwargs):
        return args, {**kwargs, "attention_mask": None}

    handle = model.base_model.register_forward_pre_hook(blind, with_kwargs=True)
    assert not shares_prompts(model)
    handle.remove()
    assert shares_prompts(model)


def test_the_cheaper_layout_is_taken(model):
    """Short completions share; those far longer than their prompt would pay for attention over all of them."""
    layouts, short, long = Layouts(model, True), rollout_of([(60, [8] * 8)]), rollout_of([(4, [600] * 8)])
    assert layouts(short).shared
    assert not layouts(long).shared
    assert not Layouts(model, False)(short).shared
    assert not layouts(rollout_of([(400, [16] * 8)])).shared  # cheaper, but longer than the model's window of 512
    weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    weights -= 0 if model.config.tie_word_embeddings else model.get_output_embeddings().weight.numel()
    pairs = 4 * model.config.num_hidden_layers * model.config.hidden_size
    assert layouts.cost(short, True) == 116 * (2 * weights + 116 * pairs)  # 60 + 8 x 7 positions
    assert layouts.cost(short, False) == 8 * 67 * (2 * weights + 67 * pairs)
