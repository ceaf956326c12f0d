"""A checkpoint is exact, whole or not there: every damage is found, and the run goes back to the one before."""

import errno
import json
import os
import random
import shutil

import pytest
import torch
from conftest import policy_of, small
from safetensors import SafetensorError

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.models.loading import load_tokenizer
from overlaprl_ray.runs import checkpoint as ck
from overlaprl_ray.runs.checkpoint import DamagedCheckpoint, commit, newest_checkpoint, verify
from overlaprl_ray.runs.files import cut_back, locked, replace_text
from overlaprl_ray.runs.saving import CheckpointWriter, load_rollouts, load_trainer, load_weights
from overlaprl_ray.runtime.preflight import preflight
from overlaprl_ray.workers.build import build_learner, build_sampler

CONFIG = small(
    grpo={"num_steps": 8, "lr": 3e-3, "beta": 0.0},
    pipeline={"mode": "overlap", "lag": 1},
    staleness={"kl_fresh": 1e-6, "kl_stale": 1e-3},
)


class Run:
    """A serial run that stops after step 2: a learner, and the rollout of batch 3, made by older weights."""

    def __init__(self, config=CONFIG):
        self.config = config
        task = preflight(config).task
        self.policy = policy_of(config, task)
        self.learner, self.sampler = build_learner(config, self.policy), build_sampler(config, task, self.policy)
        self.tokenizer = load_tokenizer(self.policy)
        self._load()
        for batch in (1, 2):
            self.learner.step(self.sampler.rollout(batch, batch - 1))
            weights = {name: value.clone() for name, value in self.learner.weights().items()}
            if batch == 1:
                self._load()
        self.next = self.sampler.rollout(3, 1)
        self.weights = weights

    def _load(self):
        self.sampler.engine.load_weights(self.learner.version, self.learner.weights())

    def save(self, folder, step=2):
        writer = CheckpointWriter(self.config, self.tokenizer)
        writer.begin(folder, step, self.learner)
        writer.complete(folder, step, [[self.next]])
        return commit(folder, step, keep=2, accuracies={})


@pytest.fixture(scope="module")
def run(cache):
    torch.set_num_threads(1)
    return Run()


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run.save(folder)
    return folder / "checkpoints" / "step-2"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_goes_on_from_it_bit_for_bit(tmp_path, dtype):
    run = Run(CONFIG.with_setting("model.dtype", dtype))
    run.save(tmp_path)
    found = newest_checkpoint(tmp_path, run.config, notice=pytest.fail)
    assert (found.step, found.batches, found.weights_steps) == (2, (3,), (1,))
    fresh = build_learner(run.config, run.policy)
    fresh.load(load_trainer(found.path))
    [[rollout]] = load_rollouts(found.path)
    one, two = run.learner.step(run.next), fresh.step(rollout)
    assert one.metrics == two.metrics
    assert one.cells == two.cells
    assert fresh.floor == run.learner.floor
    assert fresh.scheduler.summary() == run.learner.scheduler.summary()
    left, right = run.learner.weights(), fresh.weights()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(torch.equal(a, b) for a, b in zip(run.learner.optimizer.masters, fresh.optimizer.masters, strict=True))


def test_what_is_saved_is_the_state_when_it_began_though_training_goes_on(tmp_path):
    run = Run()
    before = [master.clone() for master in run.learner.optimizer.masters]
    writer = CheckpointWriter(run.config, run.tokenizer)
    writer.begin(tmp_path, 2, run.learner)
    run.learner.step(run.next)
    writer.complete(tmp_path, 2, [[run.next]])
    state = load_trainer(commit(tmp_path, 2, 1, {}).path)
    assert all(torch.equal(a, b) for a, b in zip(state["optimizer"]["masters"], before, strict=True))


def test_the_folder_is_an_ordinary_model_too(saved, run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(saved)
    assert AutoTokenizer.from_pretrained(saved)("12+34=")["input_ids"]
    for name, value in model.named_parameters():
        assert torch.equal(value, run.weights[name])


def damage_is_found(saved, folder, change):
    shutil.copytree(saved, folder / "step-2")
    change(folder / "step-2")
    try:
        with pytest.raises(DamagedCheckpoint):
            verify(folder / "step-2")
    finally:
        shutil.rmtree(folder / "step-2")


def test_every_truncation_and_bit_flip_is_found(saved, tmp_path):
    rng = random.Random(0)
    names = [path.name for path in saved.iterdir()]
    assert {"manifest.json", "trainer.pt", "rollouts.pt", "model.safetensors"} <= set(names)

    def cut(name, length):
        damage_is_found(saved, tmp_path, lambda folder: os.truncate(folder / name, length))

    def flip(name, position, bit):
        def change(folder):
            data = bytearray((folder / name).read_bytes())
            data[position] ^= 1 << bit
            (folder / name).write_bytes(data)

        damage_is_found(saved, tmp_path, change)

    for name in ("trainer.pt", "manifest.json"):
        size = (saved / name).stat().st_size
        for length in {0, 1, size - 1, *(rng.randrange(size) for _ in range(120))}:
            cut(name, length)
    for _ in range(240):
        name = rng.choice(names)
        flip(name, rng.randrange((saved / name).stat().st_size), rng.randrange(8))
    for name in names:
        damage_is_found(saved, tmp_path, lambda folder, name=name: (folder / name).unlink())
    assert verify(saved).step == 2


def test_a_damaged_one_is_passed_over_for_the_one_before(run, tmp_path):
    run.save(tmp_path, 2)
    run.save(tmp_path, 4)  # the same state under a later name: only the fall-back matters here
    notices = []
    os.truncate(tmp_path / "checkpoints" / "step-4" / "trainer.pt", 100)
    assert newest_checkpoint(tmp_path, run.config, notices.append).step == 2
    assert len(notices) == 1
    assert "step-4, which is damaged" in notices[0]
    assert "trainer.pt: its size" in notices[0]


def test_one_without_the_rollouts_that_follow_it_or_of_another_run_is_passed_over(run, tmp_path):
    run.save(tmp_path)
    notices = []
    other = run.config.with_setting("seed", 5)
    assert newest_checkpoint(tmp_path, other, notices.append) is None
    shorter = run.config.with_setting("grpo.num_steps", 2)
    assert newest_checkpoint(tmp_path, shorter, notices.append) is None  # it holds batch 3, this run ends at 2
    assert "another configuration" in notices[0]
    assert "num_steps=2" in notices[1]


@pytest.mark.parametrize("held", [True, False])
def test_the_last_one_leads_to_a_longer_run_where_it_holds_the_weights_for_it(run, tmp_path, held):
    ends = run.config.with_setting("grpo.num_steps", 2)
    weights = {1: (1, run.weights)} if held else {}
    writer = CheckpointWriter(ends, run.tokenizer)
    writer.begin(tmp_path, 2, run.learner)
    writer.complete(tmp_path, 2, [], weights)
    saved = commit(tmp_path, 2, 2, {})
    assert saved.weights == tuple(weights)
    assert newest_checkpoint(tmp_path, ends, notice=pytest.fail) == saved
    assert newest_checkpoint(tmp_path, run.config, notice=lambda text: None) == (saved if held else None)
    read = load_weights(saved.path)
    assert {step: version for step, (version, _) in read.items()} == dict.fromkeys(weights, 1)
    assert all(torch.equal(read[step][1][name], value) for step in read for name, value in run.weights.items())


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 7):
        folder = ck.scratch_of(tmp_path, step)
        folder.mkdir(parents=True)
        ck.write_manifest(folder, {"format": 1, "step": step, "version": step, "config": "", "batches": [],
                                    "weights_steps": []}, {})  # fmt: skip
        commit(tmp_path, step, keep=2, accuracies={1: 0.1, 2: 0.9, 3: 0.9, 4: 0.2})
    assert ck.saved_steps(tmp_path) == [6, 5, 3]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left"),
        (RuntimeError("PytorchStreamWriter failed writing file"), "RuntimeError: PytorchStreamWriter failed"),
        (SafetensorError("I/O error"), "SafetensorError: I/O error"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_no_half_checkpoint(run, tmp_path, monkeypatch, error, reason):
    run.save(tmp_path)

    def full(*_, **__):
        raise error

    writer = CheckpointWriter(run.config, run.tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        writer.begin(tmp_path, 5, run.learner)
        writer.thread.shutdown()  # the thread fails; room that is made meanwhile must not make a whole checkpoint of it
    with pytest.raises(RunError, match=rf"step-5 cannot be written .*{reason}"):
        writer.complete(tmp_path, 5, [[run.next]])
    assert not ck.scratch_of(tmp_path, 5).exists()
    assert newest_checkpoint(tmp_path, run.config, pytest.fail).step == 2


def test_a_folder_is_held_by_one_process(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="under way"), locked(tmp_path / "run"):
        pytest.fail("held twice")
    assert not (tmp_path / "run").exists()  # nothing was written


def test_rows_are_cut_back_and_torn_lines_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = {"step": 1, "x": "é\u2028\u0085\x0b"}  # what Unicode calls ends of lines
    text = json.dumps(first, ensure_ascii=False)
    path.write_text(text + '\n{"step": 2}\n{"step": 3}\n{"step": 4, "re', encoding="utf-8")
    assert [row["step"] for row in cut_back(path, 10)] == [1, 2, 3]
    assert cut_back(path, 1) == [first]
    assert path.read_text(encoding="utf-8") == text + "\n"
    assert cut_back(tmp_path / "none.jsonl", 3) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    replace_text(path, "old")
    (tmp_path / "f.part").mkdir()  # the scratch file cannot be opened
    with pytest.raises(OSError, match="directory"):
        replace_text(path, "new")
    assert path.read_text() == "old"
