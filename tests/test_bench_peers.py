"""The comparison with TRL: both arms do the same work by the same settings, and the figures are what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import small

pytest.importorskip("trl")

from datasets import Dataset
from overlaprl_ray.peers.arms import Arm, Job, Track, choose_arms, config_of, never_ending
from overlaprl_ray.peers.bench import Plan, compare, figures_of
from overlaprl_ray.peers.measure import Memory, measure
from overlaprl_ray.peers.report import accuracy_over_time, curve_rows, markdown
from overlaprl_ray.peers.rewards import variety
from overlaprl_ray.peers.trl_arm import Reward, check_prompts, run_trl, stream, trl_prompt, trl_settings
from trl import GRPOConfig, GRPOTrainer

from overlaprl_ray.config.cli import load_config
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.loading import load_model, load_tokenizer
from overlaprl_ray.models.tiny import ensure_tiny, tiny_tokenizer
from overlaprl_ray.tasks import Problem, build_task, prompts_of_batch
from overlaprl_ray.workers.build import build_learner, build_sampler

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own settings
TRL = Arm("TRL (1 thread)", "trl", 1)


def plain(**groups):
    """A small run by the name of its model's folder, as arms get it."""
    config = small(**groups)
    folder = ensure_tiny(config.model.tiny, build_task(config.task).train)
    return config.model_copy(update={"grpo": config.grpo.model_copy(update={"model_name": str(folder)})})


# ---- the same work ----


@pytest.fixture
def trainer(tmp_path):
    """TRL's trainer of a small run, its settings ours."""
    config = plain(grpo={"beta": 0.04, "clip_eps_high": 0.28, "lr": 3e-4, "micro_batch_size": 8, "weight_decay": 0.1})
    task, tokenizer = build_task(config.task), load_tokenizer(config.grpo.model_name)
    problems = stream(config, task, 4)
    data = {"prompt": [trl_prompt(tokenizer, p, None) for p in problems], "place": list(range(len(problems)))}
    made = GRPOTrainer(
        model=config.grpo.model_name,
        reward_funcs=Reward(config, task, problems),
        args=GRPOConfig(output_dir=str(tmp_path), **trl_settings(config, None, 4)),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
    )
    return config, task, tokenizer, made


def test_both_arms_losses_have_the_same_settings(trainer):
    """TRL's attributes, as its loss reads them, against the settings of our learner's loss, and the optimizers."""
    config, task, _, theirs = trainer
    learner = build_learner(config, task)
    ours = learner.settings
    assert (ours.clip_low, ours.clip_high) == (theirs.epsilon_low, theirs.epsilon_high) == (0.2, 0.28)
    assert (ours.dual_clip, ours.beta, ours.loss_type) == (theirs.args.delta, theirs.beta, theirs.loss_type)
    assert ours.importance_level == theirs.importance_sampling_level
    assert ours.correction == "none"
    assert config.grpo.temperature == theirs.temperature
    assert (config.grpo.group_size, config.grpo.max_new_tokens) == (
        theirs.num_generations,
        theirs.max_completion_length,
    )
    assert theirs.args.generation_batch_size == config.grpo.batch_rows
    assert theirs.args.gradient_accumulation_steps * 8 == config.grpo.batch_rows
    assert theirs.args.max_grad_norm == config.grpo.max_grad_norm
    theirs.create_optimizer()
    own = learner.optimizer.adamw.param_groups
    for group in theirs.optimizer.param_groups:
        for name in ("lr", "betas", "eps"):
            assert group[name] == own[0][name], name
    assert theirs.model.dtype == learner.model.dtype == torch.float32
    assert not theirs.model.is_gradient_checkpointing


def test_both_arms_start_from_the_same_tokens_in_the_same_order(trainer):
    config, task, tokenizer, theirs = trainer
    check_prompts(theirs, tokenizer, [*task.train, *task.heldout], None)
    batches = list(theirs.get_train_dataloader())[:: theirs.args.steps_per_generation]  # it repeats each for every part
    asked = [row["prompt"] for batch in batches for row in batch]
    count, group = config.grpo.num_prompts_per_step, config.grpo.group_size
    ours = [p.prompt for batch in range(1, 5) for p in prompts_of_batch(task.train, config.seed, batch, count)]
    assert asked[::group] == ours
    assert all(asked[i] == asked[i - i % group] for i in range(len(asked)))
    rollout = build_sampler(config, task).rollout(batch=1, weights_step=0)
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
        ({"grpo": {"micro_batch_size": 5}}, "grpo.micro_batch_size = 5"),
        ({"grpo": {"micro_batch_tokens": 512}}, "grpo.micro_batch_tokens"),
        ({"model": {"lora_r": 4}}, "model.lora_r = 4"),
    ],
)
def test_what_trl_does_otherwise_is_refused(groups, field):
    with pytest.raises(ConfigError, match=field):
        trl_settings(small(**groups), None, 4)


def test_a_copy_without_an_end_never_ends(tmp_path, cache):
    config = plain(grpo={"max_new_tokens": 40})
    task = build_task(config.task)
    folder = never_ending(config.grpo.model_name, tmp_path / "model")
    endless = config.model_copy(update={"grpo": config.grpo.model_copy(update={"model_name": str(folder)})})
    assert not build_sampler(config, task).rollout(1, 0).completion_mask.all()
    rollout = build_sampler(endless, task).rollout(1, 0)
    assert rollout.completion_mask.all()
    assert rollout.completion_mask.shape == (16, 40)
    before, after = (load_model(c, c.grpo.model_name, task).state_dict() for c in (config, endless))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_tokenizer(str(folder))("12+34=")["input_ids"] == tiny_tokenizer()("12+34=")["input_ids"]


def test_every_group_has_a_signal():
    assert variety([], ["abab", "", "abc"]) == [0.5, 0.0, 1.0]


# ---- a real run of each ----


def test_trl_runs_and_its_evaluations_are_ours(tmp_path):
    """Accuracies come from the weights TRL has; the clock stands still meanwhile; it stops at the target."""
    config = plain(grpo={"num_steps": 6}, task={"eval_size": 64})
    track = run_trl(Job(TRL, config_of(TRL, config, 0), every=2), tmp_path)
    assert [step for step, _ in track.evaluations] == [0, 2, 4, 6]
    assert track.ends == sorted(track.ends)
    assert len(track.ends) == len(track.rewards) == len(track.tokens) == 6
    assert all(16 <= n <= 16 * 5 for n in track.tokens)
    accuracy, _ = build_sampler(config, build_task(config.task)).evaluate()
    assert track.evaluations[0] == (0, accuracy)
    stopped = run_trl(Job(TRL, config_of(TRL, config, 0), every=2, target=0.0), tmp_path)
    assert len(stopped.ends) == 2
    assert stopped.seconds_to(0.0) == 0.0
    brief = run_trl(Job(TRL, config_of(TRL, config, 0), every=2, seconds=track.ends[0] / 100), tmp_path)
    assert [step for step, _ in brief.evaluations] == [0, 1]


@pytest.mark.slow
def test_script(tmp_path, cache):
    """All of it once: every completion has its full length in both, and files and table say the same."""
    out = tmp_path / "out"
    options = ["--repeats", "1", "--arms", "overlap", "trl", "--trl-threads", "1", "--warm-up", "1", "--out", str(out)]
    work = ["--grpo.num_steps", "5", "--grpo.num_prompts_per_step", "2", "--grpo.max_new_tokens", "6"]
    command = [sys.executable, ROOT / "scripts" / "bench_peers.py", "tiny", *options, *work]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "peers.json").read_text())
    overlap, trl = found["runs"]
    assert (overlap["label"], trl["label"]) == ("overlap", "TRL (1 thread)")
    assert overlap["steps"] == trl["steps"] == 5
    for run in (overlap, trl):
        assert run["tokens_per_s"] == pytest.approx(6 * run["samples_per_s"])
        assert 0 < run["pss_gb"] <= run["rss_gb"]
    assert found["arms"][0]["speed"] == pytest.approx(overlap["samples_per_s"] / trl["samples_per_s"])
    assert found["arms"][1]["speed"] == 1.0
    assert "overlap" in done.stdout
    assert "TRL (1 thread)" in (out / "table.md").read_text()


@pytest.mark.slow
def test_time_to_target(tmp_path, cache):
    """Our run is timed without evaluations, and evaluated in a second run that is the same."""
    out = tmp_path / "out"
    options = ["--repeats", "1", "--arms", "overlap", "trl", "--trl-threads", "1", "--every", "2", "--target", "0.0"]
    tiny = ["--model.tiny.warm_start_max_steps", "40", "--task.eval_size", "16", "--grpo.num_prompts_per_step", "2",
            "--task.rewards", "[overlaprl_ray.peers.rewards:variety]", "--grpo.num_steps", "4"]  # fmt: skip
    command = [sys.executable, ROOT / "scripts" / "bench_peers.py", "target", *options, *tiny, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    overlap, trl = json.loads((out / "peers.json").read_text())["runs"]
    assert len(overlap["curve"]) == 3
    assert len(trl["curve"]) == 2  # it stopped at the target
    assert overlap["curve"][0] == trl["curve"][0]  # the same model, judged by the same evaluator
    assert overlap["seconds_to_target"] == 0.0
    assert not (out / "r1-overlap" / "timed" / "checkpoints").exists()
    assert (out / "curve.png").stat().st_size > 5_000
    assert len((out / "curve.csv").read_text().splitlines()) == 1 + 3 + 2


def test_a_failing_arm_is_one_line(tmp_path, cache):
    config = plain(grpo={"num_iterations": 2}, task={"rewards": ["exact_match"]})
    with pytest.raises(ConfigError, match=r"TRL \(1 thread\): grpo.num_iterations = 2"):
        measure(Job(TRL, config), tmp_path / "run")


def test_memory_is_that_of_the_whole_tree():
    """A child of a child that holds 300 MB counts; what both share counts once in PSS and twice in RSS."""
    import psutil

    hold = "import sys; b = bytearray(300_000_000); print(1, flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        memory = Memory()
        memory.look(psutil.Process(child.pid))
    finally:
        child.communicate()
    assert 0.3 < memory.pss_gb <= memory.rss_gb < 0.4


# ---- figures ----


def track(*ends, tokens=100, evaluations=()):
    return Track(list(ends), [tokens] * len(ends), [0.5] * len(ends), list(evaluations))


def test_warm_up_and_the_last_step_are_left_out():
    plan = Plan("tiny", small(), [TRL], warm_up=2)
    got = figures_of(track(9.0, 12.0, 13.0, 14.5, 15.5, 15.6), 8, plan)
    assert got["step_s"] == 1.0  # of 1, 1.5, 1
    assert got["samples_per_s"] == pytest.approx(24 / 3.5)
    assert got["tokens_per_s"] == pytest.approx(300 / 3.5)
    assert got["train_s"] == 15.6


def test_seconds_to_target_are_those_of_the_weights():
    plan = Plan("target", small(), [TRL], every=2, target=0.6)
    run = track(1.0, 2.0, 3.0, 4.0, evaluations=[(0, 0.1), (2, 0.5), (4, 0.7)])
    assert figures_of(run, 8, plan)["seconds_to_target"] == 4.0
    assert run.curve == [(0.0, 0.1), (2.0, 0.5), (4.0, 0.7)]
    assert run.seconds_to(0.8) is None


def run_of(label, repeat, samples, seconds=None):
    kind = "trl" if label.startswith("TRL") else "own"
    return {"label": label, "kind": kind, "threads": 1, "repeat": repeat, "seed": repeat, "samples_per_s": samples,
            "step_s": 1 / samples, "tokens_per_s": samples, "rss_gb": 1.0, "pss_gb": 1.0, "accuracy_start": None,
            "accuracy_best": None, "accuracy_final": None, "train_s": 1.0, "seconds_to_target": seconds}  # fmt: skip


def test_ratios_are_to_trl_at_its_best():
    runs = [run_of("overlap", i, v, s) for i, v, s in ((1, 30.0, 5.0), (2, 40.0, 6.0), (3, 20.0, 9.0))]
    runs += [run_of("TRL (1 thread)", i, v, s) for i, v, s in ((1, 9.0, 12.0), (2, 10.0, 12.0), (3, 11.0, 12.0))]
    runs += [run_of("TRL (2 threads)", i, v, s) for i, v, s in ((1, 20.0, 15.0), (2, 15.0, None), (3, 16.0, 1.0))]
    overlap, one, two = compare(runs)
    assert overlap["speed"] == pytest.approx(30 / 16)
    assert (overlap["speed_min"], overlap["speed_max"]) == (pytest.approx(20 / 16), pytest.approx(40 / 15))
    assert (one["speed"], two["speed"]) == (pytest.approx(10 / 16), 1.0)
    assert [two[f"seconds_to_target{end}"] for end in ("", "_min", "_max")] == [15.0, 1.0, None]  # never ranks last
    assert (overlap["to_target"], overlap["to_target_max"]) == (pytest.approx(0.5), pytest.approx(0.75))
    assert compare(runs[:3])[0]["speed"] is None
    found = {"arms": [two], "every": 2, "target": 0.6, "config": {}, "runs": runs}
    assert "| 15.0 (1.0–never) | 1.25 (0.08–1.25) |" in markdown(found)[2]
    lame = [*runs[:6], *(run_of("TRL (2 threads)", i, 10.0, s) for i, s in ((1, 2.0), (2, None), (3, None)))]
    assert compare(lame)[2]["seconds_to_target"] is None  # most seeds never got there: no figure, and not TRL's best
    assert compare(lame)[0]["to_target"] == pytest.approx(0.5)
    there = [run_of("overlap", 1, 30.0, 0.0), run_of("TRL (1 thread)", 1, 9.0, 0.0)]
    assert compare(there)[0]["to_target"] is None  # at the target from the start


def test_table_and_curves_say_what_was_found():
    runs = [{**run_of("overlap", 1, 30.0), "curve": [(0.0, 0.1), (5.0, 0.7)]},
            {**run_of("TRL (1 thread)", 1, 10.0), "curve": [(0.0, 0.1), (9.0, 0.6)]}]  # fmt: skip
    lines = markdown({"arms": compare(runs), "every": None, "target": None, "config": {}, "runs": runs})
    assert lines[2].startswith("| overlap | 0.033 | 30.00 | 30 | 3.00 |")
    points = curve_rows(runs)
    assert points[1] == {"arm": "overlap", "seed": 1, "seconds": 5.0, "accuracy": 0.7}
    (axes,) = accuracy_over_time(points, target=0.5).axes
    assert [line.get_label() for line in axes.lines] == [
        "overlap, 1 seed(s)",
        "TRL (1 thread), 1 seed(s)",
        "target 0.5",
    ]
    assert list(axes.lines[1].get_xdata()) == [0.0, 9.0]


# ---- the command line ----


def test_arms():
    config = small()
    labels = [arm.label for arm in choose_arms(config, ["overlap", "sync", "trl"], [2, 1], ["autocast", "weights"])]
    assert labels == ["overlap", "sync (2 threads)", "TRL (1 thread)", "TRL (2 threads)"]
    half = small(model={"dtype": "bfloat16", "tiny": {"warm_start_max_steps": 40}})
    both = choose_arms(half, ["trl"], [2], ["autocast", "weights"])
    assert [arm.label for arm in both] == ["TRL (2 threads, bf16 autocast)", "TRL (2 threads, bf16 weights)"]
    assert trl_settings(half, "weights", 1)["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert trl_settings(half, "autocast", 1)["bf16"] is True


@pytest.mark.parametrize("work", ["tiny", "smollm2", "target"])
def test_shipped_settings_are_ones_that_trl_can_do(work):
    config = load_config(ROOT / "scripts" / "configs" / f"peers_{work}.yaml")
    trl_settings(config, None, config.grpo.num_steps)


def test_a_job_survives_its_file(tmp_path):
    job = Job(TRL, config_of(TRL, small(), 7), every=2, target=0.5)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.config.output.checkpoint_every == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["faster"], "invalid choice: 'faster'"),
        (["curve"], "give them"),
        (["tiny", "--every", "3"], "--every, --target: tiny"),
        (["smollm2"], "no folder"),
        (["tiny", "--grpo.num_steps", "5"], "grpo.num_steps = 5: 9 are the fewest"),
        (["target", "--pipeline.schedule", "latest"], "pipeline.schedule = latest"),
    ],
)
def test_a_slip_is_one_line(argv, words):
    command = [sys.executable, ROOT / "scripts" / "bench_peers.py", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_problem_without_answer_is_enough_for_a_prompt():
    assert trl_prompt(tiny_tokenizer(), Problem("1+1=", "", {}), None) == "1+1="
