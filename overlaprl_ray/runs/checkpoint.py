"""A run's checkpoints, by their files alone: naming, keeping, finding the newest whole one. No torch here.

The learner writes a checkpoint (saving.py); one rename gives the folder its name (`commit`), once the run's own
files hold every row up to its step. A manifest with sizes and SHA-256 sums exposes a damaged one.

    checkpoint = newest_checkpoint(Path("runs/x"), config, notice=print)    # falls back past damaged ones
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from overlaprl_ray.algorithm.schedule import last_older_batch
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.config.identity import check_algorithm, config_hash, free_setting

FORMAT = 1
MANIFEST, TRAINER, ROLLOUTS, WEIGHTS, STREAM = "manifest.json", "trainer.pt", "rollouts.pt", "weights.pt", "stream.pt"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: the state after `step`, and what later batches need of the time before it.

    That is the rollouts of the next batches; near a run's end, for a longer run, the weights those would be made from.
    """

    path: Path
    step: int
    batches: tuple[int, ...]  # batches whose rollouts it holds
    weights_steps: tuple[int, ...]  # the steps whose weights made them
    weights: tuple[int, ...]  # the steps whose weights it holds besides
    algorithm: int | None  # that computed it
    config: str  # hash of the configuration without the number of steps


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint of a run after a step."""
    return run / "checkpoints" / f"step-{step}"


def scratch_of(run: Path, step: int) -> Path:
    """Where it is written until it is whole."""
    return run / "checkpoints" / f"step-{step}.part"


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
    lists = {name: tuple(manifest.get(name, ())) for name in ("batches", "weights_steps", "weights")}
    return Checkpoint(path, manifest["step"], algorithm=manifest.get("algorithm"), config=manifest["config"], **lists)


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
        if checkpoint.config != config_hash(config, free_setting(config)):
            notice(f"skipped checkpoint step-{step}, which belongs to another configuration")
        elif not _leads_to(checkpoint, config):
            notice(f"skipped checkpoint step-{step}, which holds other batches than grpo.num_steps={steps} needs")
        else:
            return checkpoint
    return None


def _leads_to(checkpoint: Checkpoint, config: ExperimentConfig) -> bool:
    """Whether it holds what the batches after it are made of, and no batch beyond the run's end."""
    step, num_steps = checkpoint.step, config.grpo.num_steps
    following = set(range(step + 1, last_older_batch(step, config.lag, num_steps) + 1))
    unmade = following - set(checkpoint.batches)
    planned = config.pipeline.schedule == "exact" and config.pipeline.generation == "batch"
    sources = {max(0, batch - 1 - config.lag) for batch in unmade} if planned else set()
    return step <= num_steps and set(checkpoint.batches) <= following and sources <= {*checkpoint.weights, step}


# ---- manifests ----


def synced(paths: Iterable[Path]) -> dict[str, Any]:
    """Sync files to the disk; returns their fingerprints by name."""
    fingerprints = {}
    for path in paths:
        _sync(path)
        fingerprints[path.name] = _fingerprint(path)
    return fingerprints


def write_manifest(folder: Path, stamp: dict[str, Any], files: dict[str, Any]) -> None:
    """The last file of a checkpoint: what it is, and the fingerprints of the others."""
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
