"""vLLM (Kwon et al. 2023, arXiv 2309.06180) behind the contract of `engines/hf.py`, in the generator's own process.

What counts for training: `processed_logprobs` are of the distribution that is sampled from, at its temperature; each
row has a seed of its own; new weights go in without a restart, and no prefix computed with older ones survives them.

    engine = VLLMEngine("runs/x/final", "float32", pad_id=0, eos_ids=(2,), longest=512, memory=8_000_000_000)
    out = engine.generate([[5, 6], [7]], max_new_tokens=8, temperature=0.7, row_seeds=[(0, 1, 0), (0, 1, 1)])
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.errors import RunError
from overlaprl_ray.rollout import completion_mask

# Set before vLLM is imported, and only where the user has not: the engine in this process, so that weights need no
# copying; threads as the configuration gives them, not bound to cores that other actors use too; no usage statistics;
# on a GPU the model runner and sampler that the CPU has too, for only these are tested.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CPU_CACHE = 2**30  # bytes of keys and values without a GPU: 23,000 tokens of SmolLM2-135M; rows without room wait
WORKSPACE = 1_500_000_000  # bytes of a GPU for activations, the sampler and CUDA graphs
MOST_ROWS, MOST_TOKENS = 256, 8192  # of one forward pass: what the workspace is enough for


def cache_bytes(memory: int, weights: int) -> int:
    """Keys and values that fit beside weights and workspace; `memory` is what may be taken of a GPU, 0 for a CPU.

    vLLM would measure it, but counts what other processes take meanwhile as its own. Raises `RunError` where none fit.
    """
    if not memory:
        return CPU_CACHE
    if (cache := memory - weights - WORKSPACE) <= 0:
        raise RunError(
            f"resources.generator_gpu: of {memory / 1e9:.3g} GB for vLLM its weights take {weights / 1e9:.3g} and its "
            f"workspace {WORKSPACE / 1e9:.3g}, so no key or value fits; raise it, or use model.engine hf"
        )
    return cache


def row_seed(seed: Sequence[int]) -> int:
    """One seed of 63 bits from a row's (run, batch, row)."""
    return int(np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _refresh_tied_head(model: Any) -> None:
    """A head tied to the embedding comes with no weights of its own, so vLLM's reload leaves alone what it had made of
    the old ones: on a CPU a packed copy."""
    head = getattr(model, "lm_head", None)
    if head is not None and model.config.tie_word_embeddings:
        head.quant_method.process_weights_after_loading(head)


class VLLMEngine:
    """Generates with vLLM's own copy of the model in `folder`, a Hugging Face folder or hub name.

    `longest` is the most tokens of a prompt and its completion together; `memory` what may be taken of a GPU, bytes,
    0 for a CPU. Only our sampling settings count, not the model's generation_config.
    """

    def __init__(self, folder: str, dtype: str, pad_id: int, eos_ids: Sequence[int], longest: int, memory: int = 0):
        with torch.device("meta"):  # names and sizes alone, no memory
            bare = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.names = {name for name, _ in bare.named_parameters()}
        weights = sum(p.numel() for p in bare.parameters()) * getattr(torch, dtype).itemsize
        cache = cache_bytes(memory, weights)
        # without a GPU, compiling the one small kernel that vLLM compiles even so takes a minute
        for name, value in (ENVIRONMENT if memory else ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1"}).items():
            os.environ.setdefault(name, value)
        from vllm import LLM  # seconds, and an optional package

        self.device = torch.device("cuda" if memory else "cpu")
        place: dict[str, Any] = {"enforce_eager": True}  # without a GPU compilation costs more than it gives
        if memory:
            # vLLM still asks at its start whether this share of the GPU is free: no more than it will take
            total = torch.cuda.get_device_properties(0).total_memory
            place = {"gpu_memory_utilization": (weights + cache) / total, "max_num_seqs": MOST_ROWS,
                     "max_num_batched_tokens": max(MOST_TOKENS, longest)}  # fmt: skip
        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,  # every row has its own
            max_model_len=longest,
            kv_cache_memory_bytes=cache,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,  # the completions of a group share their prompt
            disable_log_stats=True,
            **place,
        )
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.version = -1  # of the weights held; -1 until the first load

    def load_weights(self, version: int, state: dict[str, Tensor]) -> None:
        """Take over a policy's parameters (every one of them, by name), and forget what older ones computed."""
        if self.names != state.keys():
            raise ValueError(f"weights do not fit the model: {sorted(self.names ^ state.keys())[:3]}")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state.items())})
        self.llm.apply_model(_refresh_tied_head)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept prefixes that older weights computed: rows were still running")
        self.version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        row_seeds: Sequence[Sequence[int]] | None = None,
    ) -> Generated:
        """Complete B token lists. Without `row_seeds` greedily (and the logprobs are at temperature 1); with them row
        i's noise follows from row_seeds[i], its logits to the last bits from the batch it is computed in, too."""
        from vllm import SamplingParams

        greedy = row_seeds is None
        settings = [
            SamplingParams(
                temperature=0.0 if greedy else temperature,
                seed=None if greedy else row_seed(seed),
                max_tokens=max_new_tokens,
                stop_token_ids=list(self.eos_ids),
                ignore_eos=True,  # vLLM's idea of it; ours are the line above
                logprobs=0,  # of the sampled token
                detokenize=False,
            )
            for seed in row_seeds or [()] * len(prompts)
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], settings, use_tqdm=False
        )
        rows = [output.outputs[0] for output in outputs]
        width = max((len(row.token_ids) for row in rows), default=0)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.long)
        logprobs = torch.zeros(len(rows), width, dtype=torch.float32)
        for i, row in enumerate(rows):
            tokens = list(row.token_ids)
            ids[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            found = [step[token].logprob for step, token in zip(row.logprobs, tokens, strict=True)]
            logprobs[i, : len(tokens)] = torch.tensor(found, dtype=torch.float32)
        finished = torch.tensor([row.finish_reason == "stop" for row in rows], dtype=torch.bool)
        mask = completion_mask(ids, self.eos_ids)
        lengths = torch.tensor([len(row.token_ids) for row in rows])
        mask &= torch.arange(width) < lengths[:, None]
        return Generated(ids, mask, torch.where(mask, logprobs, 0.0), finished)
