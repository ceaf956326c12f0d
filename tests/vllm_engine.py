"""The vLLM engine on a CPU, for real: run by scripts/check_vllm.sh in an environment of its own, not by plain pytest.

scripts/check_vllm.sh -k greedy
"""

import copy

import pytest
import torch
from conftest import make_rollout, read_jsonl, small
from rich.console import Console
from transformers import LlamaForCausalLM

from overlaprl_ray.config import TinyConfig
from overlaprl_ray.engines.hf import HFEngine
from overlaprl_ray.engines.vllm import VLLMEngine, row_seed
from overlaprl_ray.models.logprobs import response_logprobs
from overlaprl_ray.models.tiny import tiny_config
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.train import train

PROMPTS = [[13, 24, 5], [7], [40, 41, 42, 43, 44, 45], [9, 9]]
SHAPE = {"hidden": 64, "heads": 2}  # heads of 32, the smallest that vLLM computes on a CPU
FLOOR = 1e-4  # nats: how far two float32 programs may be apart on the logprob of a token


def policy(seed, tied=True):
    """A small Llama sharp enough that greedy has no near-ties."""
    torch.manual_seed(seed)
    settings = tiny_config(TinyConfig(**SHAPE))
    settings.tie_word_embeddings = tied
    made = LlamaForCausalLM(settings).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    return made


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def model():
    return policy(0)


@pytest.fixture(scope="module")
def loaded(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    return VLLMEngine(str(folder), "float32", pad_id=0, eos_ids=(1,), longest=128)


@pytest.fixture
def engine(loaded, model):
    loaded.load_weights(0, state(model))
    loaded.eos_ids = (1,)
    return loaded


def seeds(rows):
    return [(0, 1, row) for row in range(rows)]


def test_greedy_equals_the_other_engines(engine, model):
    ours, theirs = engine.generate(PROMPTS, 24, 1.0), HFEngine(model, 0, (1,)).generate(PROMPTS, 24, 1.0)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.mask, theirs.mask)
    assert torch.equal(ours.finished, theirs.finished)
    assert (ours.logprobs - theirs.logprobs).abs().max() < FLOOR


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
def test_behaviour_logprobs_are_the_learners_at_the_same_temperature(engine, model, temperature):
    out = engine.generate(PROMPTS * 8, 24, temperature, seeds(32))
    with torch.no_grad():
        logprobs = response_logprobs(model, make_rollout(PROMPTS * 8, out), temperature)[0]
    apart = (logprobs - out.logprobs).abs().max()
    print(f"temperature {temperature}: logprobs at most {apart:.1e} nats apart over {int(out.mask.sum())} tokens")
    assert apart < FLOOR
    assert (out.logprobs[~out.mask] == 0).all()


def test_the_same_seeds_give_the_same_text_and_others_another(engine):
    one, again = (engine.generate(PROMPTS, 24, 1.5, seeds(4)) for _ in range(2))
    assert torch.equal(one.ids, again.ids)
    assert torch.equal(one.logprobs, again.logprobs)
    other = engine.generate(PROMPTS, 24, 1.5, [(1, 1, row) for row in range(4)])
    assert not torch.equal(one.ids[:, : other.ids.shape[1]], other.ids[:, : one.ids.shape[1]])


def test_a_row_does_not_depend_on_its_neighbours(engine):
    together = engine.generate(PROMPTS, 16, 1.5, seeds(4))
    for row, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], 16, 1.5, [seeds(4)[row]])
        width = int(alone.mask.sum())
        assert torch.equal(alone.ids[0, :width], together.ids[row, :width])
        assert (alone.logprobs[0, :width] - together.logprobs[row, :width]).abs().max() < FLOOR


def test_row_seeds_are_whole_numbers_that_differ():
    made = {row_seed((run, batch, row)) for run in range(4) for batch in range(8) for row in range(64)}
    assert len(made) == 4 * 8 * 64
    assert all(0 <= seed < 2**63 for seed in made)


def test_sampling_follows_the_distribution(engine, model):
    """Chi-square of 4,000 first tokens against the model's softmax at temperature 2, likely tokens one by one."""
    rows, temperature = 4000, 2.0
    out = engine.generate([PROMPTS[0]] * rows, 1, temperature, seeds(rows))
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / temperature, -1)
    counts = torch.bincount(out.ids[:, 0], minlength=len(chances)).double()
    often = chances * rows > 8
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([chances[often], chances[~often].sum()[None]]) * rows
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_every_eos_id_ends_a_row_and_is_kept(engine):
    engine.eos_ids = tuple(range(0, 98, 3))
    out = engine.generate([[5]] * 32, 12, 1.5, seeds(32))
    is_eos = torch.isin(out.ids, torch.tensor(engine.eos_ids)) & out.mask
    assert out.finished.sum() > 8
    last = out.mask.sum(1) - 1
    for row in range(32):
        assert is_eos[row].nonzero().flatten().tolist() == ([int(last[row])] if out.finished[row] else [])
        assert out.finished[row] or int(last[row]) == 11


def test_weights_are_copied_not_kept(engine, model):
    mine = state(model)
    engine.load_weights(3, mine)
    before = engine.generate(PROMPTS, 12, 1.0)
    for tensor in mine.values():
        tensor.zero_()
    assert torch.equal(engine.generate(PROMPTS, 12, 1.0).ids, before.ids)


def test_weights_of_another_model_are_refused(engine):
    with pytest.raises(ValueError, match="do not fit"):
        engine.load_weights(1, {"a": torch.zeros(1)})


# vLLM's groups of processes are one for all engines of a process, and end with the first of them that goes: from here
# on each test has an engine of its own.


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_change_greedy_outputs_to_the_new_policys(tied, tmp_path):
    """Of every parameter: one left behind, such as a head tied to the embedding, would show in text and logprobs."""
    old, new = policy(1, tied), policy(2, tied)
    old.save_pretrained(tmp_path)
    engine = VLLMEngine(str(tmp_path), "float32", 0, (1,), longest=300)
    long = [*PROMPTS, list(range(3, 90)) * 3]  # one beyond a block of the prefix cache, which must not survive
    before = engine.generate(long, 24, 1.0)
    for version, held in enumerate((new, old, new), start=1):
        engine.load_weights(version, state(held))
        after, expected = engine.generate(long, 24, 1.0), HFEngine(held, 0, (1,)).generate(long, 24, 1.0)
        assert engine.version == version
        assert torch.equal(after.ids, expected.ids)
        assert (after.logprobs - expected.logprobs).abs().max() < FLOOR
        assert torch.equal(after.ids, before.ids) == (held is old)


# ---------------------------------------------------------------------------------------------------------------------
# A run


def run_of(engine, folder):
    config = small(
        model={"engine": engine, "tiny": {**SHAPE, "warm_start_max_steps": 40, "warm_start_batch": 64}},
        grpo={"lr": 3e-3},
        task={"rewards": ["dense_reward:restless"]},  # signal in every group
        output={"dir": str(folder), "completions_every": 1, "eval_every": 2},
        pipeline={"mode": "overlap"},
    )
    return config, train(config, Console(quiet=True))


def test_four_steps_of_overlap_with_both_engines_learn_from_valid_logprobs(local_ray, tmp_path):
    rows = {}
    for engine in ("hf", "vllm"):
        _, summary = run_of(engine, tmp_path / engine)
        rows[engine] = read_jsonl(tmp_path / engine / "metrics.jsonl")
        first = rows[engine][0]
        print(engine, {key: first[key] for key in ("ratio/mean", "staleness_kl", "reward", "entropy") if key in first},
              "floor", summary.get("staleness_floor"))  # fmt: skip
        assert summary["steps"] == 4
        assert abs(first["ratio/mean"] - 1) < FLOOR
        assert summary["staleness_floor"] < FLOOR**2
    hf, vllm = rows["hf"], rows["vllm"]
    # the same policy answers the same prompts with other noise
    assert hf[0]["reward"] == pytest.approx(vllm[0]["reward"], abs=0.25)
    assert hf[0]["entropy"] == pytest.approx(vllm[0]["entropy"], rel=0.25)
    # step 3 was generated by weights that step 1 had changed: with those at hand the ratio is 1 up to one step's drift
    assert [row["version"] for row in read_jsonl(tmp_path / "vllm" / "completions.jsonl")] != [0] * (4 * 16)


def test_a_run_and_its_serial_replay_agree(local_ray, tmp_path):
    """Bit for bit here, where batches are computed in one step each; vLLM promises it nowhere."""
    config, _ = run_of("vllm", tmp_path / "run")
    rows, _ = replay(copy.deepcopy(config))
    made = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for ours, theirs in zip(made, rows, strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["reward"] == theirs["reward"]
