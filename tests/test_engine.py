"""The decode loop: greedy equals transformers' own, logprobs are of what was sampled, rows leave one another alone."""

import importlib.util
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, MistralConfig

from overlaprl_ray.config import ExperimentConfig, TinyConfig
from overlaprl_ray.config.cli import build_config
from overlaprl_ray.engines.hf import SHARED_FROM, HFEngine, row_uniforms, sample
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.logprobs import check_head, response_logprobs
from overlaprl_ray.models.tiny import tiny_config, tiny_tokenizer
from overlaprl_ray.rollout import completion_mask, pad_left, position_ids
from overlaprl_ray.runtime.inputs import check_inputs
from overlaprl_ray.workers.reference import Reference

PROMPTS = [[13, 24, 5], [7], [40, 41, 42, 43, 44, 45], [9, 9]]


@pytest.fixture(scope="module", params=["rotary", "learned", "sliding"])
def model(request):
    """A Llama with relative positions and a GPT-2 with absolute ones, where a wrong position id cannot hide; and a
    Mistral that sees 10 tokens, whose cache forgets."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "pad_token_id": 0, "eos_token_id": 1}
    architecture = {
        "rotary": tiny_config(TinyConfig()),
        "learned": GPT2Config(**sizes, n_positions=64, n_embd=32, n_layer=2, n_head=2),
        "sliding": MistralConfig(
            **sizes, sliding_window=10, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1,
        ),
    }  # fmt: skip
    made = AutoModelForCausalLM.from_config(architecture[request.param]).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # sharp enough that greedy has no near-ties
    return made


@pytest.fixture
def engine(model):
    return HFEngine(model, pad_id=0, eos_ids=(1,))


def hf_greedy(model, prompts, new, pad, eos):
    ids, mask = pad_left(prompts, pad)
    out = model.generate(
        ids, attention_mask=mask.long(), max_new_tokens=new, do_sample=False, pad_token_id=pad, eos_token_id=list(eos)
    )
    return out[:, ids.shape[1] :]


def seeds(rows):
    return [(0, 1, row) for row in range(rows)]


def test_greedy_equals_transformers_generate(model, engine):
    ours = engine.generate(PROMPTS, 24, 1.0)
    theirs = hf_greedy(model, PROMPTS, 24, 0, (1,))
    width = min(theirs.shape[1], ours.ids.shape[1])
    assert width > 3
    mask = completion_mask(theirs, (1,))[:, :width]
    assert torch.equal(ours.ids[:, :width][mask], theirs[:, :width][mask])
    assert torch.equal(ours.mask[:, :width], mask)


@pytest.mark.slow
@pytest.mark.skipif("OVERLAPRL_SMOLLM2" not in os.environ, reason="set OVERLAPRL_SMOLLM2 to a SmolLM2 folder")
def test_greedy_equals_transformers_generate_on_a_real_model():
    folder = os.environ["OVERLAPRL_SMOLLM2"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in ("What is 59 + 63?", "Name three colours, please, and say which of them the sky has.", "Hi")
    ]
    eos = (tokenizer.eos_token_id,)
    ours = HFEngine(model, tokenizer.pad_token_id, eos).generate(prompts, 32, 1.0)
    theirs = hf_greedy(model, prompts, 32, tokenizer.pad_token_id, eos)
    mask = completion_mask(theirs, eos)
    assert torch.equal(ours.ids[mask[:, : ours.ids.shape[1]]], theirs[mask])


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
def test_behaviour_logprobs_are_those_of_a_naive_loop_over_positions(model, engine, temperature):
    """No padding, no cache, no batch: one forward per token, so any shift by one, mask or position error shows."""
    out = engine.generate(PROMPTS, 12, temperature, seeds(len(PROMPTS)))
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for t in range(int(out.mask[row].sum())):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text])).logits[0, -1].double()
            token = int(out.ids[row, t])
            expected = torch.log_softmax(logits / temperature, -1)[token]
            assert out.logprobs[row, t] == pytest.approx(float(expected), abs=2e-4)
            text.append(token)
    assert (out.logprobs[~out.mask] == 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_learner_logprobs_equal_behaviour_logprobs(model, engine, temperature, rollout_of):
    out = engine.generate(PROMPTS, 12, temperature, seeds(len(PROMPTS)))
    logprobs, entropy = response_logprobs(model, rollout_of(PROMPTS, out), temperature)
    assert (logprobs - out.logprobs).abs().max() < 2e-4
    assert (entropy[out.mask] > 0).all()
    assert (entropy[~out.mask] == 0).all()


def test_a_row_does_not_depend_on_its_neighbours(engine):
    """Neither on their padding nor on their leaving the batch."""
    together = engine.generate(PROMPTS, 16, 1.0, seeds(4))
    for row, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], 16, 1.0, [seeds(4)[row]])
        width = int(alone.mask.sum())
        assert torch.equal(alone.ids[0, :width], together.ids[row, :width])
        assert int(together.mask[row].sum()) == width
        assert (alone.logprobs[0, :width] - together.logprobs[row, :width]).abs().max() < 1e-4


def test_finished_rows_leave_the_batch(model, engine, monkeypatch):
    sizes = []
    forward = model.forward

    def counting(*args, **kwargs):
        sizes.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    everything = tuple(range(0, 98, 2))  # half of all tokens end a row
    out = HFEngine(model, 0, everything).generate([[5]] * 16, 12, 1.5, [(0, 0, row) for row in range(16)])
    assert sizes[0] == 16
    assert sizes[-1] < 16
    assert sorted(sizes, reverse=True) == sizes
    assert out.finished.any()


def test_a_groups_prompt_is_computed_once_and_its_rows_are_as_if_alone(model, engine, monkeypatch):
    long = [[5 + (3 * i + 7 * j) % 80 for j in range(SHARED_FROM + i)] for i in range(3)]
    prompts = [long[i] for i in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    computed = []
    forward = model.forward

    def counting(*args, **kwargs):
        computed.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    out = engine.generate(prompts, 12, 1.0, seeds(9))
    assert computed[:2] == [(3, SHARED_FROM + 2), (9, 1)]
    for row, prompt in enumerate(prompts):
        alone = engine.generate([prompt], 12, 1.0, [seeds(9)[row]])
        width = int(alone.mask.sum())
        assert torch.equal(alone.ids[0, :width], out.ids[row, :width])
        assert (alone.logprobs[0, :width] - out.logprobs[row, :width]).abs().max() < 1e-4
    assert not torch.equal(out.ids[0], out.ids[1])  # one prompt, each row its own seed


def test_short_prompts_are_computed_row_by_row(model, engine, monkeypatch):
    """So that runs of the built-in task keep their bits."""
    sizes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: (sizes.append(k["input_ids"].shape), forward(*a, **k))[1])
    engine.generate([[5] * (SHARED_FROM - 1)] * 4, 2, 1.0, seeds(4))
    assert sizes[0] == (4, SHARED_FROM - 1)


def test_every_eos_id_ends_a_row(model):
    eos = tuple(range(0, 98, 3))
    out = HFEngine(model, 0, eos).generate([[5]] * 16, 12, 1.5, seeds(16))
    is_eos = torch.isin(out.ids, torch.tensor(eos)) & out.mask
    assert is_eos.any(1)[out.finished].all()
    assert out.finished.sum() > 8
    last = out.mask.sum(1) - 1
    assert all(is_eos[row].nonzero().flatten().tolist() == [int(last[row])] for row in out.finished.nonzero().flatten())


def test_the_first_eos_is_kept_and_nothing_after_it_even_where_pad_is_eos():
    ids = torch.tensor([[7, 2, 2, 2], [7, 8, 9, 4], [2, 7, 2, 7]])
    expected = [[True, True, False, False], [True, True, True, True], [True, False, False, False]]
    assert completion_mask(ids, eos_ids=(2,)).tolist() == expected
    assert completion_mask(ids, eos_ids=(2, 8)).tolist()[1] == [True, True, False, False]


def test_pad_equal_to_eos_changes_nothing(model):
    one = HFEngine(model, 0, (1,)).generate(PROMPTS, 24, 1.0, seeds(4))
    other = HFEngine(model, 1, (1,)).generate(PROMPTS, 24, 1.0, seeds(4))
    assert torch.equal(one.mask, other.mask)
    assert torch.equal(one.ids[one.mask], other.ids[one.mask])


def test_the_models_own_generation_config_does_not_count(model, engine):
    plain = engine.generate(PROMPTS, 16, 1.0, seeds(4))
    saved = model.generation_config
    try:
        model.generation_config = type(saved)(do_sample=True, top_k=1, repetition_penalty=5.0, temperature=0.1)
        assert torch.equal(engine.generate(PROMPTS, 16, 1.0, seeds(4)).ids, plain.ids)
    finally:
        model.generation_config = saved


def test_sampling_follows_the_distribution():
    """Chi-square over 40,000 draws: the inverse CDF with seeded uniforms has the softmax's frequencies."""
    logits = torch.tensor([2.0, 0.0, 1.0, float("-inf"), -1.0])
    uniforms = row_uniforms([(0, 0, row) for row in range(40)], 1000).flatten()
    tokens, logprobs = sample(logits.expand(len(uniforms), -1), 0.8, uniforms)
    probabilities = torch.softmax(logits / 0.8, -1)
    counts = torch.bincount(tokens, minlength=5).double()
    expected = probabilities.double() * len(tokens)
    assert counts[3] == 0
    live = expected > 0
    assert float(((counts - expected)[live] ** 2 / expected[live]).sum()) < 16.3  # 0.1 % point of chi-square, 3 d.f.
    assert torch.allclose(logprobs, probabilities.log()[tokens])


def test_uniforms_are_a_function_of_the_row_seed():
    one, other = row_uniforms([(3, 5, 7)], 8), row_uniforms([(1, 1, 1), (3, 5, 7)], 8)
    assert torch.equal(one[0], other[1])
    assert not torch.equal(other[0], other[1])
    longer = row_uniforms([(3, 5, 7)], 20)
    assert torch.equal(longer[0, :8], one[0])


def test_extreme_uniforms_stay_inside_the_vocabulary():
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    below_one = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sample(logits, 1.0, torch.tensor([0.0], dtype=torch.float64))[0].item() == 1
    assert sample(logits, 1.0, below_one)[0].item() == 2


def test_load_weights_refuses_another_model(engine):
    with pytest.raises(ValueError, match="do not fit"):
        engine.load_weights(1, {"a": torch.zeros(1)})


def test_check_head_refuses_a_model_that_changes_its_logits(model):
    assert check_head(model) < 1e-4
    handle = model.register_forward_hook(lambda module, args, out: out.__class__(logits=out.logits * 0.5))
    try:
        with pytest.raises(ValueError, match="after the output head"):
            check_head(model)
        with pytest.raises(ValueError, match="after the output head"):
            Reference(ExperimentConfig(), model)
    finally:
        handle.remove()


def test_tiny_tokenizer_round_trips_text():
    tokenizer = tiny_tokenizer()
    text = "12+34= What? {x}\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_position_ids_count_from_the_first_real_token():
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_vllm_missing_is_found_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = build_config({"model": {"engine": "vllm", "tiny": {"heads": 2}}})
    with pytest.raises(ConfigError, match=r"model.engine = 'vllm'.*pip install 'overlaprl_ray\[vllm\]'.*or use hf"):
        check_inputs(config)


def test_heads_that_vllm_cannot_compute_are_refused_with_ones_that_it_can():
    with pytest.raises(ConfigError, match=r"model.engine=vllm wants heads of 32.*makes 16; try heads=2 and hidden=64"):
        build_config({"model": {"engine": "vllm"}})
