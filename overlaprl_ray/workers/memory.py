"""How much memory this process holds, by where it computes; and how much a GPU has.

memory_gb(torch.device("cpu"))   # 0.43
"""

import os
from typing import Any

import psutil
import pynvml
import torch


def gpus() -> list[Any]:
    """This machine's GPUs for questions to their driver, which need no CUDA context; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]


def device_bytes() -> int | None:
    """Memory of the smallest GPU; None without one."""
    return min((pynvml.nvmlDeviceGetMemoryInfo(gpu).total for gpu in gpus()), default=None)


def memory_gb(device: torch.device) -> float:
    """GB (1e9 bytes) held now: on a GPU as its driver counts it, CUDA context included; on a CPU the resident set."""
    if device.type != "cuda":
        return psutil.Process().memory_info().rss / 1e9
    clients = [client for gpu in gpus() for client in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    held = sum(client.usedGpuMemory or 0 for client in clients if client.pid == os.getpid())
    # in a container the driver may know this process by another number
    return (held or torch.cuda.max_memory_reserved(device)) / 1e9
