"""How much memory this process holds, by where it computes.

memory_gb(torch.device("cpu"))   # 0.43
"""

import psutil
import torch


def memory_gb(device: torch.device) -> float:
    """GB (1e9 bytes): on a GPU the most it has allocated so far, on a CPU the resident set of this process now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return psutil.Process().memory_info().rss / 1e9
