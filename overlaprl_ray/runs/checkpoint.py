"""Exact save and resume: a checkpoint holds everything needed to resume, and is either whole or absent.

Besides policy and optimizer that includes the rollouts of the `lag` batches after it: they are made with older weights,
which the checkpoint does not hold. So the learner copies its state after step c (`begin`), trains on while a thread
writes it, and adds those rollouts once they exist (`complete`). One rename gives the folder its name (`commit`), once
the run's own files hold every row up to step c. A manifest with sizes and SHA-256 sums exposes a damaged checkpoint.

    checkpoint = newest_checkpoint(Path("runs/x"), config, notice=print)    # falls back past damaged ones
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import shutil
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
    config: str  # hash of the configuration without the number of steps


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint of a run after a step."""
    return run / "checkpoints" / f"step-{step}"


def scratch_of(run: Path, step: int) -> Path:
    """Where it is written until it is whole."""
    return run / "checkpoints" / f"step-{step}.part"


# ---- writing: in the learner's process ----


class CheckpointWriter:
    """Writes one checkpoint at a time while training goes on."""

    def __init__(self, config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase):
        self.config, self.tokenizer = config, tokenizer
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.begun: dict[int, tuple[int, concurrent.futures.Future[dict[str, Any]]]] = {}  # step -> version, files

    def begin(self, run: Path, step: int, learner: Learner) -> None:
        """Copy the state after `step` and start writing it."""
        concurrent.futures.wait([files for _, files in self.begun.values()])  # one copy in memory at a time
        save, state = learner.saver(), learner.state()
        folder = scratch_of(run, step)

        def write() -> dict[str, Any]:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            save(folder)
            self.tokenizer.save_pretrained(folder)
            torch.save(state, folder / TRAINER)
            return _synced(folder.iterdir())

        self.begun[step] = learner.version, self.thread.submit(write)

    def complete(self, run: Path, step: int, batches: Sequence[Sequence[Rollout]]) -> None:
        """Add the rollouts of the batches after it (each as its generators' shares), the manifest, and sync to disk."""
        folder, (version, files) = scratch_of(run, step), self.begun.pop(step)
        try:
            written = files.result()
            torch.save([[_as_dict(share) for share in shares] for shares in batches], folder / ROLLOUTS)
            stamp = {
                "format": FORMAT,
                "algorithm": ALGORITHM,
                "step": step,
                "version": version,
                "config": config_hash(self.config, but=free_setting(self.config)),
                "batches": [shares[0].batch for shares in batches],
                "weights_steps": [shares[0].weights_step for shares in batches],
            }
            _write_manifest(folder, stamp, written | _synced([folder / ROLLOUTS]))
        except Exception as error:  # a full disk has many names: OSError, SafetensorError, torch's RuntimeError
            shutil.rmtree(folder, ignore_errors=True)  # room for the rest of the run's files
            first_line = (str(error).splitlines() or [""])[0]
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {first_line}"
            raise RunError(
                f"checkpoint step-{step} cannot be written in '{run}' ({reason or error}); free some space there, or "
                "set output.checkpoint_every to 0"
            ) from error


def _as_dict(rollout: Rollout) -> dict[str, Any]:
    return {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}


def _synced(paths: Iterable[Path]) -> dict[str, Any]:
    """Sync files to the disk; returns their fingerprints by name."""
    fingerprints = {}
    for path in paths:
        _sync(path)
        fingerprints[path.name] = _fingerprint(path)
    return fingerprints


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
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of this step, from before the run was resumed
    os.replace(scratch_of(run, step), final)
    _sync(final.parent)
    steps = saved_steps(run)
    best = max((s for s in steps if s in accuracies), key=lambda s: (accuracies[s], s), default=None)
    for old in steps[keep:]:
        if old != best:
            shutil.rmtree(folder_of(run, old))
    return _as_checkpoint(final, _read_manifest(final))


def saved_steps(run: Path) -> list[int]:
    """The steps of the checkpoints that have their name, newest first."""
    names = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def clear_scratch(run: Path) -> None:
    """Remove what was left half written."""
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
            actual = _fingerprint(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{name}: {error.strerror}") from None
        if actual != expected:
            kind = "size" if actual["bytes"] != expected["bytes"] else "checksum"
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
        raise DamagedCheckpoint(f"its format is {manifest['format']}; this version reads {FORMAT}")
    return manifest


def _as_checkpoint(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    batches, weights_steps = tuple(manifest["batches"]), tuple(manifest["weights_steps"])
    return Checkpoint(path, manifest["step"], batches, weights_steps, manifest.get("algorithm"), manifest["config"])


def newest_checkpoint(run: Path, config: ExperimentConfig, notice: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint from which this configuration can go on; `notice` hears why others were skipped."""
    steps = config.grpo.num_steps
    for step in saved_steps(run):
        try:
            checkpoint = verify(folder_of(run, step))
        except DamagedCheckpoint as error:
            notice(f"skipped checkpoint step-{step}, which is damaged: {error}")
            continue
        check_algorithm(checkpoint.algorithm, f"checkpoint '{checkpoint.path}'")
        following = tuple(range(step + 1, min(step + config.lag, steps) + 1))
        if checkpoint.config != config_hash(config, but=free_setting(config)):
            notice(f"skipped checkpoint step-{step}, which belongs to another configuration")
        elif step > steps or checkpoint.batches != following:
            notice(f"skipped checkpoint step-{step}, which holds other batches than grpo.num_steps={steps} needs")
        else:
            return checkpoint
    return None


def load_trainer(path: Path) -> dict[str, Any]:
    """The learner's state (see `Learner.state`)."""
    return torch.load(path / TRAINER, weights_only=True)


def load_rollouts(path: Path) -> list[list[Rollout]]:
    """The rollouts of the batches after the checkpoint, each as its generators' shares."""
    return [[Rollout(**share) for share in shares] for shares in torch.load(path / ROLLOUTS, weights_only=True)]
