"""Peak memory of a learner step with SmolLM2-135M's vocabulary and width: chunked logprobs against all the logits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAYERS = int(os.environ.get("OVERLAPRL_PEAK_LAYERS", "4"))  # 30 is SmolLM2-135M; what is compared lies in its head


def measured(kind: str, rows: int, folder: Path) -> tuple[float, torch.Tensor]:
    """(peak above what was resident before the step, GB; gradient)"""
    script, gradient = Path(__file__).parent / "peak.py", folder / f"{kind}-{rows}.pt"
    command = [sys.executable, str(script), kind, str(rows), str(LAYERS), str(gradient)]
    # glibc gives blocks from this size back at once: else its heap's fragments count, another number in every run
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800, env=environment).stdout
    found = json.loads(out.splitlines()[-1])
    print(kind, rows, found)
    return found["peak_gb"] - found["before_gb"], torch.load(gradient)


def apart(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resets its peak through Linux's /proc")
def test_chunks_take_less_than_half_of_the_naive_peak_with_equal_gradients(tmp_path):
    """32 sequences x 256 completion tokens, float32, gradient checkpointing in all of them; any micro-batch size."""
    naive, oracle = measured("naive", 32, tmp_path)
    peaks = {}
    for rows in (32, 4, 1):
        peaks[rows], gradient = measured("chunked", rows, tmp_path)
        assert apart(gradient, oracle) < 1e-5
    assert peaks[32] <= 0.5 * naive
    # small ones save activations; at full size the sum of their gradients beside them outweighs that
    assert peaks[1] < (peaks[32] if LAYERS == 4 else 1.1 * peaks[32])
