"""The comparison with TRL: both arms do the same work by the same settings, and the figures are what they say."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import small

pytest.importorskip("trl")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from arm import Job, _peak_memory, changed, measure  # noqa: E402
from compare_trl import figures_of, jobs_of, main, never_ending, summarize  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoConfig, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_arm import Clock, Reward, check_prompts, run_trl, trl_prompt, trl_settings  # noqa: E402
from variety import variety  # noqa: E402

from overlaprl_ray.algorithm.schedule import learning_rate  # noqa: E402
from overlaprl_ray.config.cli import load_config  # noqa: E402
from overlaprl_ray.errors import ConfigError, RunError  # noqa: E402
from overlaprl_ray.models.loading import check_tokenizer, load_model, load_tokenizer  # noqa: E402
from overlaprl_ray.models.tiny import tiny_folder, tiny_tokenizer  # noqa: E402
from overlaprl_ray.tasks import build_task, prompts_of_batch  # noqa: E402
from overlaprl_ray.workers.build import build_learner, build_sampler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own settings


def plain(**groups):
    """A small run by the name of its model's folder, as arms get it."""
    config = small(**groups)
    return changed(config, grpo={"model_name": str(tiny_folder(config.model.tiny, build_task(config.task).train))})


@pytest.fixture
def trainer(tmp_path):
    """TRL's trainer of a small run, its settings ours."""
    grpo = {"beta": 0.04, "clip_eps_high": 0.28, "lr": 3e-4, "micro_batch_size": 8, "weight_decay": 0.1}
    config = plain(grpo={**grpo, "adam_beta2": 0.99, "lr_warmup_steps": 3})
    task, tokenizer = build_task(config.task), load_tokenizer(config.grpo.model_name)
    problems = [p for batch in range(1, 5) for p in prompts_of_batch(task.train, config.seed, batch, 4)]
    data = {"prompt": [trl_prompt(tokenizer, p, None) for p in problems], "place": list(range(len(problems)))}
    made = GRPOTrainer(
        model=config.grpo.model_name,
        reward_funcs=Reward(config, task, problems),
        args=GRPOConfig(output_dir=str(tmp_path), **trl_settings(config, None, 4)),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
    )
    return config, task, tokenizer, made


def test_both_arms_have_the_same_settings(trainer):
    """TRL's attributes, as its loss and optimizer read them, against ours."""
    config, _, _, theirs = trainer
    grpo = config.grpo
    assert grpo.trust_region == (1 - theirs.epsilon_low, 1 + theirs.epsilon_high) == (0.8, 1.28)
    assert (grpo.dual_clip, grpo.beta, grpo.loss_type) == (theirs.args.delta, theirs.beta, theirs.loss_type)
    assert grpo.use_bias_correction_kl is theirs.args.use_bias_correction_kl is True
    assert (grpo.importance_level, grpo.temperature) == (theirs.importance_sampling_level, theirs.temperature)
    assert (grpo.group_size, grpo.max_new_tokens) == (theirs.num_generations, theirs.max_completion_length)
    assert theirs.args.generation_batch_size == grpo.batch_rows == theirs.args.gradient_accumulation_steps * 8
    assert theirs.args.max_grad_norm == grpo.max_grad_norm
    theirs.create_optimizer()
    own = build_learner(config, config.grpo.model_name).optimizer.adamw.param_groups
    for mine, group in zip(own, theirs.optimizer.param_groups, strict=True):
        assert [mine[name] for name in ("betas", "eps", "weight_decay")] == [
            group[name] for name in ("betas", "eps", "weight_decay")
        ]
        assert sum(p.numel() for p in mine["params"]) == sum(p.numel() for p in group["params"])
    assert theirs.model.dtype == torch.float32


def test_the_rate_of_each_step_is_ours(trainer):
    config, task, _, theirs = trainer
    clock = Clock(Job("trl", 1, None, config), task)
    seen = []

    class Spy(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            seen.append(kwargs["optimizer"].param_groups[0]["lr"])

    theirs.add_callback(clock)
    theirs.add_callback(Spy())
    theirs.train()
    assert seen == [learning_rate(step, config.grpo) for step in range(1, 5)]


def test_both_arms_start_from_the_same_tokens_in_the_same_order(trainer):
    config, task, tokenizer, theirs = trainer
    check_prompts(theirs, tokenizer, [*task.train, *task.heldout], None)
    batches = list(theirs.get_train_dataloader())[:: theirs.args.steps_per_generation]  # it repeats each for every part
    asked = [row["prompt"] for batch in batches for row in batch]
    group = config.grpo.group_size
    assert asked[::group] == [
        p.prompt for batch in range(1, 5) for p in prompts_of_batch(task.train, config.seed, batch, 4)
    ]
    assert all(asked[i] == asked[i - i % group] for i in range(len(asked)))
    rollout = build_sampler(config, task, config.grpo.model_name).rollout(batch=1, weights_step=0)
    mine = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    assert theirs._tokenize_prompts(asked[: config.grpo.batch_rows])[0] == mine


def test_chat_models_get_the_same_tokens_and_a_difference_is_refused(trainer):
    _, task, tokenizer, theirs = trainer
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    check_prompts(theirs, tokenizer, task.heldout, "Add.")
    theirs.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # TRL may be given one of its own
    with pytest.raises(RunError, match="different work"):
        check_prompts(theirs, tokenizer, task.heldout, "Add.")


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"grpo": {"num_iterations": 2}}, "grpo.num_iterations = 2"),
        ({"grpo": {"num_minibatches": 2}}, "grpo.num_minibatches = 2"),
        ({"grpo": {"correction": "truncated"}}, "grpo.correction = truncated"),
        ({"grpo": {"kl_penalty": "k2"}}, "grpo.kl_penalty = k2"),
        ({"grpo": {"clip_eps": None}}, "grpo.clip_eps = null"),
        ({"grpo": {"importance_level": "sequence", "beta": 0.1}}, "grpo.importance_level = sequence"),
        ({"grpo": {"micro_batch_size": 5}}, "grpo.micro_batch_size = 5"),
        ({"grpo": {"micro_batch_tokens": 512}}, "grpo.micro_batch_tokens"),
        ({"model": {"lora_r": 4}}, "model.lora_r = 4"),
    ],
)
def test_what_trl_does_otherwise_is_refused(groups, field):
    with pytest.raises(ConfigError, match=field):
        trl_settings(small(**groups), None, 4)


def test_a_copy_without_an_end_never_ends(tmp_path):
    config = plain(grpo={"max_new_tokens": 40})
    task = build_task(config.task)
    folder = never_ending(Path(config.grpo.model_name), tmp_path / "model")
    endless = changed(config, grpo={"model_name": str(folder)})
    check_tokenizer(load_tokenizer(str(folder)), AutoConfig.from_pretrained(folder), str(folder))
    assert not build_sampler(config, task, config.grpo.model_name).rollout(1, 0).completion_mask.all()
    rollout = build_sampler(endless, task, str(folder)).rollout(1, 0)
    assert rollout.completion_mask.all()
    assert rollout.completion_mask.shape == (16, 40)
    before, after = (load_model(name).state_dict() for name in (config.grpo.model_name, str(folder)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_tokenizer(str(folder))("12+34=")["input_ids"] == tiny_tokenizer()("12+34=")["input_ids"]


def test_every_group_has_a_signal():
    assert variety([], ["abab", "", "abc"]) == [0.5, 0.0, 1.0]


def test_trl_runs_and_its_evaluations_are_ours():
    """Accuracies come from the weights TRL has; it stops at the target, or after so many seconds."""
    config = plain(grpo={"num_steps": 6}, task={"eval_size": 64})
    ends, tokens, rewards, evaluations = run_trl(Job("trl", 1, None, config, 2)).values()
    assert [step for step, _ in evaluations] == [0, 2, 4, 6]
    assert ends == sorted(ends)
    assert len(ends) == len(rewards) == len(tokens) == 6
    assert all(16 <= n <= 16 * 5 for n in tokens)
    accuracy, _ = build_sampler(config, build_task(config.task), config.grpo.model_name).evaluate()
    assert evaluations[0] == (0, accuracy)
    assert len(run_trl(Job("trl", 1, None, config, 2, target=0.0))["ends"]) == 2
    assert [step for step, _ in run_trl(Job("trl", 1, None, config, 2, seconds=ends[0] / 100))["evaluations"]] == [0, 1]


@pytest.mark.ci
def test_an_arm_runs_in_a_process_of_its_own_and_its_failure_is_one_line(tmp_path):
    config = plain(task={"rewards": ["exact_match"]})
    track = measure(Job("trl", 1, None, config), tmp_path / "run")
    assert len(track["ends"]) == 4
    assert 0.1 < track["memory_gb"] < 5
    with pytest.raises(RunError, match=r"^trl, 1 thread\(s\): grpo.num_iterations = 2: .*log.txt$"):
        measure(Job("trl", 1, None, changed(config, grpo={"num_iterations": 2})), tmp_path / "bad")


def test_memory_is_that_of_the_whole_tree():
    """A child of a child that holds 300 MB counts."""
    hold = "import time; b = bytearray(300_000_000); time.sleep(1.5)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    assert 0.3 < _peak_memory(subprocess.Popen([sys.executable, "-c", outer]), "it") < 0.4


def test_warm_up_and_the_last_step_are_left_out_and_targets_are_those_of_weights():
    ends = [9.0, 12.0, 13.0, 14.5, 15.5, 15.6]
    track = {"ends": ends, "evaluations": [(0, 0.1), (2, 0.5), (4, 0.7)], "memory_gb": 1.0}
    got = figures_of(track, 8, 2, 0.6)
    assert got["step_s"] == 1.0  # of 1, 1.5, 1
    assert got["samples_per_s"] == pytest.approx(24 / 3.5)
    assert got["curve"] == [(0.0, 0.1), (12.0, 0.5), (14.5, 0.7)]
    assert got["seconds_to_target"] == 14.5
    assert figures_of(track, 8, 2, 0.8)["seconds_to_target"] is None


def test_ratios_are_to_trl_at_its_best():
    runs = [
        {"label": label, "arm": label.split(",")[0], "figures": {"x": x, "curve": []}}
        for label, x in (("overlap, 1", 30.0), ("trl, 1", 10.0), ("trl, 2", 20.0), ("sync, 1", None))
    ]
    assert [row["ratio"] for row in summarize(runs, "x", max)] == [1.5, 0.5, 1.0, None]
    assert [row["ratio"] for row in summarize(runs, "x", min)] == [3.0, 1.0, 2.0, None]
    assert summarize(runs[:1], "x", max)[0]["ratio"] is None


def test_arms_and_shipped_settings():
    args = argparse.Namespace(work="speed", arms=["overlap", "sync", "trl"], trl_threads=[2, 1], every=5, target=None)
    assert [job.label for job in jobs_of(small(), args)] == [
        "overlap, 1 thread(s)", "sync, 2 thread(s)", "trl, 1 thread(s)", "trl, 2 thread(s)"]  # fmt: skip
    half = small(model={"dtype": "bfloat16", "tiny": {"warm_start_max_steps": 40}})
    assert [job.bf16 for job in jobs_of(half, args)] == [None, None, "autocast", "autocast", "weights", "weights"]
    for name in ("compare_tiny", "compare_smollm2", "smollm2_addition"):
        config = load_config(ROOT / "scripts" / "configs" / f"{name}.yaml")
        trl_settings(config, None, config.grpo.num_steps)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["faster"], "invalid choice: 'faster'"),
        (["speed", "--repeats", "0"], "'0' is not a whole number"),
        (["speed", "--grpo.num_steps", "5"], "grpo.num_steps = 5"),
        (["learning", "--grpo.num_iterations", "2"], "grpo.num_iterations = 2"),
        (["speed", "--output.dir", str(ROOT)], "holds another run or other files"),
    ],
)
def test_a_slip_is_one_line(argv, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        main(argv)
