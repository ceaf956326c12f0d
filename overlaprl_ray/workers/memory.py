"""How much memory this process holds, by where it computes.

memory_gb(torch.device("cpu"))   # 0.43
"""

import os

import psutil
import pynvml
import torch


def memory_gb(device: torch.device) -> float:
    """GB (1e9 bytes) held now: on a GPU as its driver counts it, CUDA context included; on a CPU the resident set."""
    if device.type != "cuda":
        return psutil.Process().memory_info().rss / 1e9
    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    clients = [client for gpu in gpus for client in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    held = sum(client.usedGpuMemory or 0 for client in clients if client.pid == os.getpid())
    # in a container the driver may know this process by another number
    return (held or torch.cuda.max_memory_reserved(device)) / 1e9
