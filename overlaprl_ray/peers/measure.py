"""One arm in a process of its own, its memory watched from outside; and the process's own side of it.

Memory is that of the process and all its descendants (Ray's own processes are among ours): RSS four times a second,
and PSS, which counts a page shared by n processes 1/n times in each, whenever RSS is at a new high.

    track, memory = measure(Job(arm, config), Path("runs/peers/r1-overlap"))
    python -m overlaprl_ray.peers.measure runs/peers/r1-overlap    # what it starts
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.peers.arms import Job, Track

PERIOD_S = 0.25
LIMIT_S = 12 * 3600.0
NOTICEABLE = 1.01  # how much higher RSS must be for PSS to be read again: reading it costs milliseconds a process


@dataclasses.dataclass
class Memory:
    """Peaks over time of sums over a tree of processes, in GB (1e9 bytes)."""

    rss_gb: float = 0.0
    pss_gb: float = 0.0

    def look(self, root: psutil.Process) -> None:
        """Take the tree's memory as it is now into the peaks."""
        processes = [root, *root.children(recursive=True)]
        rss = sum(_bytes(process, "rss") for process in processes) / 1e9
        if rss > NOTICEABLE * self.rss_gb:
            self.rss_gb = rss
            self.pss_gb = max(self.pss_gb, sum(_bytes(process, "pss") for process in processes) / 1e9)


def _bytes(process: psutil.Process, kind: str) -> int:
    try:
        found = process.memory_full_info() if kind == "pss" else process.memory_info()
    except psutil.Error:  # it ended between listing and reading
        return 0
    return int(getattr(found, kind))


def measure(job: Job, folder: Path) -> tuple[Track, Memory]:
    """Do a job in a fresh process. Raises `RunError` with the last line of its log where it fails."""
    folder.mkdir(parents=True)
    job.write(folder / "job.json")
    threads = str(job.arm.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "RAY_ADDRESS": "local"}
    command = [sys.executable, "-m", "overlaprl_ray.peers.measure", str(folder)]
    memory = Memory()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code = _watch(child, memory, job.arm.label)
        finally:
            if child.poll() is None:  # we were interrupted: it must not go on alone
                child.terminate()
                try:
                    child.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    child.kill()
    if code:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        kind = ConfigError if code == ConfigError.exit_code else RunError
        raise kind(f"{job.arm.label}: {(lines or ['no output'])[-1].removeprefix('error: ')}; see {folder}/log.txt")
    return Track.read(folder / "track.json"), memory


def _watch(child: subprocess.Popen[bytes], memory: Memory, label: str) -> int:
    """Until the child ends; its exit code. Raises `RunError` after a time that no comparison needs."""
    root, deadline = psutil.Process(child.pid), time.monotonic() + LIMIT_S
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise RunError(f"{label}: no end after {LIMIT_S / 3600:g} hours; does it hang? else give it fewer steps")
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
            memory.look(root)
        time.sleep(PERIOD_S)
    return child.wait()


def main(argv: list[str]) -> None:
    """Do the job in a folder, in this process."""
    folder = Path(argv[0])
    job = Job.read(folder / "job.json")
    if job.arm.kind == "trl":
        from overlaprl_ray.peers.trl_arm import run_trl as run  # only in the arm that needs it: an extra
    else:
        from overlaprl_ray.peers.own_arm import run_own as run
    run(job, folder).write(folder / "track.json")


if __name__ == "__main__":
    from overlaprl_ray.config.cli import run_script

    run_script(main)
