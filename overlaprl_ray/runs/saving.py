"""The learner's side of exact save and resume: everything needed to resume, written whole or not at all.

Besides policy and optimizer that includes the rollouts of the `lag` batches after it: they are made with older weights,
which the checkpoint does not hold. So the learner copies its state after step c (`begin`), trains on while a thread
writes it, and adds those rollouts once they exist (`complete`).

    writer = CheckpointWriter(config, tokenizer)
    writer.begin(run, step, learner); writer.complete(run, step, rollouts)
"""

import concurrent.futures
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import ALGORITHM, config_hash, free_setting
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import Rollout
from overlaprl_ray.runs.checkpoint import FORMAT, ROLLOUTS, STREAM, TRAINER, WEIGHTS, scratch_of, synced, write_manifest
from overlaprl_ray.workers.learner import Learner


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
            return synced(folder.iterdir())

        self.begun[step] = learner.version, self.thread.submit(write)

    def abandon(self, run: Path, step: int) -> None:
        """Remove one that cannot be completed."""
        _, files = self.begun.pop(step)
        concurrent.futures.wait([files])
        shutil.rmtree(scratch_of(run, step), ignore_errors=True)

    def complete(
        self,
        run: Path,
        step: int,
        batches: Sequence[Sequence[Rollout]],
        weights: Mapping[int, tuple[int, dict[str, Tensor]]] = MappingProxyType({}),
        stream: dict[str, Any] | None = None,
    ) -> None:
        """Add the rollouts of the batches after it (each as its generators' shares), the manifest, and sync to disk.

        `weights`: older ones that batches beyond the run's end would be made from, as step -> (version, weights).
        `stream`: the state of the generator's stream when it took over the weights of this step.
        """
        folder, (version, files) = scratch_of(run, step), self.begun.pop(step)
        try:
            written = files.result()
            added: dict[str, Any] = {ROLLOUTS: [[vars(share) for share in shares] for shares in batches]}
            added |= {WEIGHTS: dict(weights)} if weights else {}
            added |= {STREAM: stream} if stream else {}
            for name, content in added.items():
                torch.save(content, folder / name)
            stamp = {
                "format": FORMAT,
                "algorithm": ALGORITHM,
                "step": step,
                "version": version,
                "config": config_hash(self.config, free_setting(self.config)),
                "batches": [shares[0].batch for shares in batches],
                "weights_steps": [shares[0].weights_step for shares in batches],
                "weights": list(weights),
            }
            write_manifest(folder, stamp, written | synced(folder / name for name in added))
        except Exception as error:  # a full disk has many names: OSError, SafetensorError, torch's RuntimeError
            shutil.rmtree(folder, ignore_errors=True)  # room for the rest of the run's files
            first_line = (str(error).splitlines() or [""])[0]
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {first_line}"
            raise RunError(
                f"checkpoint step-{step} cannot be written in '{run}' ({reason or error}); free some space there, or "
                "set output.checkpoint_every to 0"
            ) from error


def load_trainer(path: Path) -> dict[str, Any]:
    """The learner's state (see `Learner.state`)."""
    return torch.load(path / TRAINER, weights_only=True)


def load_rollouts(path: Path) -> list[list[Rollout]]:
    """The rollouts of the batches after the checkpoint, each as its generators' shares."""
    return [[Rollout(**share) for share in shares] for shares in torch.load(path / ROLLOUTS, weights_only=True)]


def load_stream(path: Path) -> dict[str, Any]:
    """The state of the generator's stream (see `StreamSampler.state`)."""
    return torch.load(path / STREAM, weights_only=True)


def load_weights(path: Path) -> dict[int, tuple[int, dict[str, Tensor]]]:
    """The older weights that a checkpoint near a run's end holds, as step -> (version, weights)."""
    return torch.load(path / WEIGHTS, weights_only=True) if (path / WEIGHTS).exists() else {}
