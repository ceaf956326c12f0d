"""Exact save and resume: a checkpoint holds all that the steps after it depend on, and is either whole or not there.

Besides policy and optimizer these are the rollouts of the `lag` batches after it: older weights make them, which the
checkpoint could not make again. So the learner copies its state after step c (`begin`), trains on while a thread writes
it, and adds those rollouts when they exist (`complete`). The folder then gets its name (`commit`): by one rename, once
the run's own files hold every row up to step c. A manifest with sizes and SHA-256 sums tells a damaged checkpoint.

    found = newest_checkpoint(Path("runs/x"), config, notice=print)    # falls back past damaged ones
"""

import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import ALGORITHM, check_algorithm, config_hash, free_setting
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Rollout
from overlaprl_ray.workers.learner import Learner

FORMAT = 1
MANIFEST, TRAINER, ROLLOUTS = "manifest.json", "trainer.pt", "rollouts.pt"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: the state after `step`, and the rollouts of the batches after it, by batch."""

    path: Path
    step: int
    batches: tuple[int, ...]  # batches whose rollouts it holds
    weights_steps: tuple[int, ...]  # the steps whose weights made them
    algorithm: int | None  # that computed it
    config: str  # hash of the configuration, but for the number of steps


def folder_of(run: Path, step: int) -> Path:
    """Where a run's checkpoint after a step lies."""
    return run / "checkpoints" / f"step-{step}"


def scratch_of(run: Path, step: int) -> Path:
    """Where it is written, until it is whole."""
    return run / "checkpoints" / f"step-{step}.part"


# ---- writing: in the learner's process ----


@dataclasses.dataclass
class _Begun:
    """A checkpoint without its rollouts: what its thread has written, or why it could not."""

    version: int
    files: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: Exception | None = None


class CheckpointWriter:
    """Writes one checkpoint at a time beside the training that goes on."""

    def __init__(self, config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase):
        self.config, self.tokenizer = config, tokenizer
        self.thread: threading.Thread | None = None
        self.begun: dict[int, _Begun] = {}  # by step

    def begin(self, run: Path, step: int, learner: Learner) -> None:
        """Copy the state after `step` and start writing it."""
        self._join()
        save, state = learner.saver(), learner.state()
        begun = self.begun[step] = _Begun(learner.version)
        folder = scratch_of(run, step)

        def write() -> None:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                save(folder)
                self.tokenizer.save_pretrained(folder)
                torch.save(state, folder / TRAINER)
                begun.files = _settled(folder.iterdir())
            except Exception as error:  # a full disk has many names: OSError, SafetensorError, torch's RuntimeError
                begun.error = error

        self.thread = threading.Thread(target=write, name="checkpoint")
        self.thread.start()

    def complete(self, run: Path, step: int, batches: Sequence[Sequence[Rollout]]) -> None:
        """Add the rollouts of the batches after it (each as its generators' shares), the manifest, and sync to disk."""
        self._join()
        folder, begun = scratch_of(run, step), self.begun.pop(step)
        try:
            if begun.error:
                raise begun.error
            torch.save([[_as_dict(share) for share in shares] for shares in batches], folder / ROLLOUTS)
            stamp = {
                "format": FORMAT,
                "algorithm": ALGORITHM,
                "step": step,
                "version": begun.version,
                "config": config_hash(self.config, but=free_setting(self.config)),
                "batches": [shares[0].batch for shares in batches],
                "weights_steps": [shares[0].weights_step for shares in batches],
            }
            _write_manifest(folder, stamp, begun.files | _settled([folder / ROLLOUTS]))
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)  # room for the rest of the run's files
            first_line = (str(error).splitlines() or [""])[0]
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {first_line}"
            raise RunError(
                f"checkpoint step-{step} cannot be written in '{run}' ({reason or error}); make room there, or set "
                "output.checkpoint_every 0 to go without"
            ) from error

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def _as_dict(rollout: Rollout) -> dict[str, Any]:
    return {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}


def _settled(paths: Iterable[Path]) -> dict[str, Any]:
    """The fingerprints of files that are on the disk for good."""
    found = {}
    for path in paths:
        _sync(path)
        found[path.name] = _fingerprint(path)
    return found


def _write_manifest(folder: Path, stamp: dict[str, Any], files: dict[str, Any]) -> None:
    manifest = {**stamp, "files": files}
    text = json.dumps({**manifest, "digest": _digest(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# ---- naming and keeping: in the driver, by file names alone ----


def commit(run: Path, step: int, keep: int, accuracies: dict[int, float]) -> Checkpoint:
    """Give a completed checkpoint its name, and remove all but the newest `keep` and the best by held-out accuracy."""
    final = folder_of(run, step)
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of this step, which the run went back behind
    os.replace(scratch_of(run, step), final)
    _sync(final.parent)
    steps = saved_steps(run)
    evaluated = [s for s in steps if s in accuracies]
    best = max(evaluated, key=lambda s: (accuracies[s], s), default=None)
    for old in steps[keep:]:
        if old != best:
            shutil.rmtree(folder_of(run, old))
    return _as_checkpoint(final, _read_manifest(final))


def saved_steps(run: Path) -> list[int]:
    """The steps of the checkpoints that have their name, newest first."""
    names = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def clear_scratch(run: Path) -> None:
    """Remove what an interrupted writing left behind."""
    for path in (*(run / "checkpoints").glob("step-*.part"), *run.glob("final.part")):
        shutil.rmtree(path, ignore_errors=True)


# ---- reading ----


class DamagedCheckpoint(Exception):
    """Why a checkpoint cannot be used."""


def verify(path: Path) -> Checkpoint:
    """Check every byte against the manifest. Raises `DamagedCheckpoint`."""
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        try:
            found = _fingerprint(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{name}: {error.strerror}") from None
        if found != expected:
            kind = "size" if found["bytes"] != expected["bytes"] else "checksum"
            raise DamagedCheckpoint(f"{name}: its {kind} differs from the manifest's")
    return _as_checkpoint(path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.pop("digest", None) != _digest(manifest):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise DamagedCheckpoint(f"its format is {manifest['format']}, this version reads {FORMAT}")
    return manifest


def _as_checkpoint(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    batches, weights_steps = tuple(manifest["batches"]), tuple(manifest["weights_steps"])
    return Checkpoint(path, manifest["step"], batches, weights_steps, manifest.get("algorithm"), manifest["config"])


def newest_checkpoint(run: Path, config: ExperimentConfig, notice: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint that this configuration can go on from; each one passed over is told to `notice`."""
    for step in saved_steps(run):
        try:
            found = verify(folder_of(run, step))
        except DamagedCheckpoint as error:
            notice(f"checkpoint step-{step} is damaged and passed over: {error}")
            continue
        check_algorithm(found.algorithm, f"checkpoint '{found.path}'")
        if found.config != config_hash(config, but=free_setting(config)):
            notice(f"checkpoint step-{step} belongs to another configuration: passed over")
            continue
        last = min(step + config.lag, config.grpo.num_steps)
        if step > config.grpo.num_steps or found.batches != tuple(range(step + 1, last + 1)):
            notice(f"checkpoint step-{step} does not lead on to grpo.num_steps={config.grpo.num_steps}: passed over")
            continue
        return found
    return None


def load_trainer(path: Path) -> dict[str, Any]:
    """The learner's state (see `Learner.state`)."""
    return torch.load(path / TRAINER, weights_only=True)


def load_rollouts(path: Path) -> list[list[Rollout]]:
    """The rollouts of the batches after the checkpoint, each as its generators' shares."""
    return [[Rollout(**share) for share in shares] for shares in torch.load(path / ROLLOUTS, weights_only=True)]
