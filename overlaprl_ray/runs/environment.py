"""Where a run was made: versions, hardware and commit, for environment.json.

environment()["versions"]["torch"]
"""

import os
import platform
import shutil
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from overlaprl_ray.config.identity import ALGORITHM

PACKAGES = ("overlaprl_ray", "torch", "transformers", "datasets", "ray", "numpy", "pandas")


def environment() -> dict[str, Any]:
    """What a figure must be read with, as seen from a process that computes."""
    import torch

    return {
        "algorithm": ALGORITHM,
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git_commit": git_commit(Path(__file__).parents[2]),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def git_commit(root: Path) -> str | None:
    """The commit of a checkout, with "-dirty" where tracked files differ; None for an installed package."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "HEAD") + dirty or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
