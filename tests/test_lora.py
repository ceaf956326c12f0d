"""LoRA: the base stays, the adapter learns, is published, saved and gone on from; no second model outside `overlap`."""

import copy

import pytest
import torch
from conftest import policy_of, read_jsonl, small
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from pydantic import ValidationError
from safetensors.torch import load_file
from test_replay import cumulative, untimed
from transformers import AutoModelForCausalLM

from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.files import check_model_files
from overlaprl_ray.models.loading import load_model, load_tokenizer
from overlaprl_ray.models.logprobs import response_logprobs
from overlaprl_ray.models.lora import add_adapter
from overlaprl_ray.runs.checkpoint import commit, newest_checkpoint
from overlaprl_ray.runs.saving import CheckpointWriter, load_trainer
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.runtime.replay import replay
from overlaprl_ray.runtime.resources import plan_resources
from overlaprl_ray.runtime.train import train
from overlaprl_ray.runtime.weights import publish
from overlaprl_ray.workers.build import build_learner, build_reference, build_sampler
from overlaprl_ray.workers.learner import Learner

STALE = {"kl_fresh": 1e-6, "kl_stale": 1e-2}


def config_of(mode="overlap", lag=1, output=None, **groups):
    grpo = {"num_steps": 4, "lr": 1e-2, **groups.pop("grpo", {})}
    model = {"lora_r": 4, **groups.pop("model", {})}
    pipeline = {"mode": mode, "lag": lag}
    return small(grpo=grpo, model=model, pipeline=pipeline, staleness=STALE, output=output or {}, **groups)


@pytest.fixture(scope="module")
def task(cache):
    torch.set_num_threads(1)
    return preflight(config_of()).task


def trained(config, task, steps=2):
    """A learner after some steps of its own rollouts, its sampler with it."""
    policy = policy_of(config, task)
    learner, sampler = build_learner(config, policy), build_sampler(config, task, policy)
    reference = build_reference(config, policy, learner=learner) if config.grpo.beta else None
    results = []
    for step in range(1, steps + 1):
        sampler.engine.load_weights(learner.version, learner.weights())
        rollout = sampler.rollout(step, step - 1)
        results.append(learner.step(rollout, reference.score(rollout) if reference else None))
    return learner, sampler, results


def logits(model):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        return model(input_ids=ids).logits


# ---- what learns ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "v_proj"]])
def test_nothing_but_the_adapter_is_trainable_and_the_base_does_not_move(task, target, dtype):
    config = config_of(model={"lora_target": target, "dtype": dtype}, grpo={"weight_decay": 0.1})
    learner, _, _ = trained(config, task)
    parameters = dict(learner.model.named_parameters())
    trainable = {name for name, p in parameters.items() if p.requires_grad}
    assert trainable == {name for name in parameters if ".lora_A." in name or ".lora_B." in name} != set()
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in trainable}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == (every if target == "all-linear" else set(target))
    base = dict(load_model(policy_of(config, task), dtype).named_parameters())
    held = {name.replace(".base_layer", ""): p for name, p in parameters.items() if name not in trainable}
    assert held.keys() == base.keys()
    assert all(torch.equal(held[name], base[name]) for name in base)
    moved = [p for name, p in parameters.items() if ".lora_B." in name]
    assert all(p.abs().max() > 0 for p in moved)  # they start at 0
    assert {p.dtype for name, p in parameters.items() if name in trainable} == {torch.float32}
    assert set(learner.weights()) == trainable
    assert publish(1, learner.weights()).arrays.keys() == trainable


def test_only_the_seed_decides_how_an_adapter_starts(task):
    def start(seed):
        config = config_of(seed=seed)
        torch.rand(3)  # what was drawn before does not count
        return add_adapter(config.model, config.seed, load_model(policy_of(config, task))).state_dict()

    one, two, other = start(0), start(0), start(1)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_scale_is_alpha_over_rank(task):
    for alpha, expected in ((None, 2.0), (2, 0.5)):
        config = config_of(model={"lora_alpha": alpha})
        model = load_model(policy_of(config, task))
        add_adapter(config.model, config.seed, model)
        assert {m.scaling["default"] for m in model.modules() if isinstance(m, LoraLayer)} == {expected}


# ---- the reference ----


@pytest.mark.parametrize("mode", ["sync", "async", "staleness", "overlap"])
def test_the_policy_starts_as_its_reference(task, mode):
    _, _, results = trained(config_of(mode, grpo={"beta": 0.1}), task, steps=1)
    assert 0 <= results[0].metrics["kl_ref"] <= 1e-10
    assert results[0].metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert ("reference" in results[0].memory_gb) == (mode == "overlap")
    assert results[0].spans["reference"][1] >= results[0].spans["reference"][0]


def test_the_adapter_off_is_the_base_and_scoring_leaves_no_trace(task):
    config = config_of("async", grpo={"beta": 0.1})
    learner, sampler, _ = trained(config, task)
    rollout = sampler.rollout(3, 2)
    before = {name: value.clone() for name, value in learner.weights().items()}
    policy = policy_of(config, task)
    found = build_reference(config, policy, learner=learner)
    apart = build_reference(config_of("overlap", grpo={"beta": 0.1}), policy)
    assert found.model is learner.model
    assert apart.model is not learner.model
    one, two = found.score(rollout), apart.score(rollout)
    assert torch.equal(one.logprobs, two.logprobs)
    assert (one.memory_gb, two.memory_gb is None) == (None, False)
    assert before.keys() == learner.weights().keys()
    assert all(torch.equal(value, learner.weights()[name]) for name, value in before.items())
    assert not torch.allclose(one.logprobs, rollout.logprobs, atol=1e-3)  # the policy has moved away


@pytest.mark.parametrize(
    ("mode", "model", "beta", "actor", "learner"),
    [
        ("overlap", {}, 0.1, True, False),
        ("async", {}, 0.1, False, True),
        ("sync", {}, 0.1, False, True),
        ("async", {"reference": "some/model"}, 0.1, True, False),
        ("async", {"lora_r": 0}, 0.1, True, False),
        ("async", {}, 0.0, False, False),
        ("overlap", {"lora_r": 0}, 0.0, False, False),
    ],
)
def test_who_scores(mode, model, beta, actor, learner):
    config = config_of(mode, model=model, grpo={"beta": beta})
    assert (config.needs_reference, config.learner_scores) == (actor, learner)
    plan = plan_resources(config, gpus=1.0)
    assert len(plan.shares) == (3 if actor else 2)
    assert (plan.reference_gpu > 0) == actor
    line = plan.lines()[1]
    assert ("the learner" in line, "none" in line) == (learner, not actor and not learner)


# ---- what is saved ----


def test_saved_adapter_and_merged_model_are_the_policy(task, tmp_path):
    learner, _, _ = trained(config_of(), task)
    save = learner.saver()
    expected = logits(learner.model)
    with torch.no_grad():  # training goes on
        for value in learner.weights().values():
            value.add_(0.1)
    save(tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    base = load_model(policy_of(config_of(), task))
    again = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(logits(again), expected)
    merged = again.merge_and_unload()
    assert (logits(merged) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_copy_is_a_plain_model(task, tmp_path, monkeypatch, dtype):
    learner, _, _ = trained(config_of(model={"dtype": dtype}), task)
    with monkeypatch.context() as patch:  # each parameter goes to the CPU by itself: a GPU has no room for a second set
        patch.setattr(torch.nn.Parameter, "__deepcopy__", lambda parameter, memo: pytest.fail("copied on its device"))
        plain = learner.master_copy()
    assert {p.device.type for p in plain.parameters()} == {"cpu"}
    exact = copy.deepcopy(learner.model).float()
    assert (logits(plain) - logits(exact)).abs().max() < 1e-4
    assert (logits(plain) - logits(load_model(policy_of(config_of(), task)))).abs().max() > 1e-2
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert torch.equal(logits(loaded), logits(plain))
    check_model_files(str(tmp_path), "grpo.model_name")


def test_going_on_from_a_checkpoint_is_exact(task, tmp_path):
    config = config_of(grpo={"beta": 0.0})
    learner, sampler, _ = trained(config, task)
    rollout = sampler.rollout(3, 1)
    writer = CheckpointWriter(config, load_tokenizer("tiny"))
    writer.begin(tmp_path, 2, learner)
    writer.complete(tmp_path, 2, [[rollout]])
    folder = commit(tmp_path, 2, keep=1, accuracies={}).path
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    whole = sum(p.numel() * p.element_size() for p in learner.model.parameters())
    assert (folder / "trainer.pt").stat().st_size < whole  # masters and moments of the adapter alone
    found = newest_checkpoint(tmp_path, config, notice=pytest.fail)
    fresh = build_learner(config, policy_of(config, task))
    fresh.load(load_trainer(found.path))
    assert all(torch.equal(fresh.weights()[name], value) for name, value in learner.weights().items())
    assert learner.step(rollout).metrics == fresh.step(rollout).metrics
    assert all(torch.equal(fresh.weights()[name], value) for name, value in learner.weights().items())


# ---- whole runs ----


@pytest.mark.parametrize(
    ("mode", "model"),
    [("overlap", {}), ("async", {}), pytest.param("sync", {"gradient_checkpointing": True}, marks=pytest.mark.slow)],
)
def test_a_run_equals_its_replay_and_leaves_an_adapter(local_ray, tmp_path, mode, model):
    output = {"dir": str(tmp_path / "run"), "merge_lora": True, "checkpoint_every": 2}
    config = config_of(mode, model=model, grpo={"beta": 0.05}, output=output)
    rows, weights = replay(config)
    summary = train(config)
    folder = tmp_path / "run"
    assert untimed(read_jsonl(folder / "metrics.jsonl")) == cumulative(rows)
    assert summary["accuracy_final"] is not None
    assert ("memory/reference_gb" in read_jsonl(folder / "metrics.jsonl")[0]) == (mode == "overlap")
    saved = load_file(folder / "final" / "adapter_model.safetensors")
    assert len(saved) == len(weights)
    for name, value in saved.items():
        parts = name.removeprefix("base_model.model.").rpartition(".weight")
        assert torch.equal(weights[f"{parts[0]}.default.weight"], value)
    task = preflight(config_of()).task
    adapted = PeftModel.from_pretrained(load_model(policy_of(config_of(), task)), str(folder / "final"))
    merged = AutoModelForCausalLM.from_pretrained(folder / "final" / "merged")
    assert (logits(adapted) - logits(merged)).abs().max() < 1e-4
    with pytest.raises(ConfigError, match=r"LoRA adapter alone.*final/merged"):
        check_model_files(str(folder / "final"), "grpo.model_name")
    assert (folder / "checkpoints" / "step-2" / "adapter_model.safetensors").exists()


def test_modes_differ_in_who_scores_and_not_in_numbers():
    """With lag and rule alike, the learner's base gives what the reference actor's copy gives."""
    (one, weights), (two, others) = (
        replay(config_of(mode, lag=2, grpo={"beta": 0.1, "micro_batch_size": 3})) for mode in ("staleness", "overlap")
    )
    assert one == two
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_an_adapter_alone_learns_what_its_advantages_say(task):
    """Passes over one batch: what was better than its siblings becomes likelier than what was worse."""
    config = config_of("sync", grpo={"beta": 0.0, "lr": 1e-3, "num_iterations": 10})
    policy = policy_of(config, task)
    learner, sampler = build_learner(config, policy), build_sampler(config, task, policy)
    sampler.engine.load_weights(0, learner.weights())
    rollout = sampler.rollout(1, 0)
    learner.step(rollout)
    now, _ = response_logprobs(learner.model, rollout, 1.0)
    gained = (now.detach() - rollout.logprobs).sum(1)
    assert (gained * rollout.advantages).sum() > 0.1


# ---- refusals ----


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"lora_target = \['q_proj', 'lm_head'\]: lm_head is no linear.*q_proj"):
        preflight(config_of(model={"lora_target": ["q_proj", "lm_head"]}))
    with pytest.raises(ConfigError, match="nothing is no linear layer"):
        preflight(config_of(model={"lora_target": []}))
    with pytest.raises(ValidationError, match=r"merge_lora=true with model\.lora_r=0"):
        config_of(model={"lora_r": 0}, output={"merge_lora": True})
    with pytest.raises(ValidationError, match=r"lora_r=4 goes only with model\.engine=hf"):
        config_of(model={"engine": "vllm", "tiny": {"heads": 2, "hidden": 64}})


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r'model\.lora_r = 4: peft is not installed; pip install "overlaprl_ray\[lora\]"'
    ):
        preflight(config_of())


def test_without_lora_nothing_changes(task):
    learner = build_learner(small(), policy_of(small(), task))
    assert learner.adapter is None
    assert learner.weights().keys() == dict(learner.model.named_parameters()).keys()
    assert isinstance(learner, Learner)
