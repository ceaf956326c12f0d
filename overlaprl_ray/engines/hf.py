"""A decode loop over a Hugging Face causal model with attention in every layer (checks/architecture.py) and its cache.

Why not `model.generate`: here the logprob of each sampled token comes for free and exactly (no tensor of scores is
kept), a row's text depends on its own seed alone, and rows that have finished leave the batch.

    engine = HFEngine(model, pad_id=0, eos_ids=(2,))
    out = engine.generate([[5, 6], [7]], max_new_tokens=8, temperature=0.7, row_seeds=[(0, 1, 0), (0, 1, 1)])
"""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from overlaprl_ray.rollout import completion_mask, pad_left, position_ids

# newer releases of transformers call the argument `cache`; the older name works in all of the range we require
warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated", category=FutureWarning)


# Prompt tokens from which on a prompt that several rows share is computed once. SmolLM2-135M on a CPU, 60 tokens and
# groups of 8: 31 % less time with 16 new tokens, 9 % with 64 (bfloat16). Short ones, as our sums, gain little.
SHARED_FROM = 32


@dataclasses.dataclass(frozen=True)
class Generated:
    """Completions of B prompts, on the CPU: ids (B, T) int64, mask and logprobs (B, T), finished (B,) bool."""

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    finished: Tensor


def row_uniforms(row_seeds: Iterable[Sequence[int]], length: int) -> Tensor:
    """(B, length) float64 in [0, 1): one per row and position, a function of the row's seed alone."""
    return torch.from_numpy(np.stack([np.random.default_rng(list(seed)).random(length) for seed in row_seeds]))


def sample(logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token per row from (b, V) logits: (tokens (b,), logprobs (b,)), through the inverse of the CDF.

    `uniforms` (b,) in [0, 1); None takes the likeliest token (the logprob is then at `temperature` all the same).
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if uniforms is None:
        tokens = logits.argmax(dim=-1)
    else:
        cdf = logprobs.double().exp().cumsum(dim=-1)
        # right=True: the first token whose CDF exceeds u, so a token of probability 0 is never drawn
        tokens = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


class HFEngine:
    """Generates with a Hugging Face causal model held in this process. Only our sampling settings count:
    the model's own generation_config (top_k, repetition penalty ...) is not read, but for its EOS ids by the caller."""

    def __init__(self, model: PreTrainedModel, pad_id: int, eos_ids: Sequence[int]):
        self.model = model.eval()
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.version = -1  # of the weights held; -1 until the first load

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @torch.no_grad()
    def load_weights(self, version: int, state: dict[str, Tensor]) -> None:
        """Take over a policy's trainable parameters (every one of them, by name); under LoRA the adapter's alone."""
        own = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if own.keys() != state.keys():
            raise ValueError(f"weights do not fit the model: {sorted(own.keys() ^ state.keys())[:3]}")
        for name, parameter in own.items():
            parameter.copy_(state[name])
        self.version = version

    def forward(self, tokens: Tensor, attention: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits (b, V) after the last of the tokens (b, t); the cache takes in their keys and values."""
        return self.model(
            input_ids=tokens,
            attention_mask=attention.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def prefill(
        self, prompts: Sequence[Sequence[int]], ids: Tensor, attention: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits (B, V) after the prompts (B, Tp); equal prompts, such as a group's, are computed once."""
        places: dict[tuple[int, ...], int] = {}
        owner = torch.tensor([places.setdefault(tuple(prompt), len(places)) for prompt in prompts], device=ids.device)
        if len(places) == len(prompts) or ids.shape[1] < SHARED_FROM:
            return self.forward(ids, attention, positions, cache)
        first = torch.tensor([owner.tolist().index(place) for place in range(len(places))], device=ids.device)
        logits = self.forward(ids[first], attention[first], positions[first], cache)
        cache.batch_select_indices(owner)
        return logits[owner]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        row_seeds: Sequence[Sequence[int]] | None = None,
    ) -> Generated:
        """Complete B token lists. Without `row_seeds` greedily; with them row i's text follows from row_seeds[i]."""
        device, rows = self.model.device, len(prompts)
        prompt_ids, prompt_mask = pad_left(prompts, self.pad_id)
        attention = torch.cat([prompt_mask, torch.ones(rows, max_new_tokens, dtype=torch.bool)], dim=1).to(device)
        positions = position_ids(attention)
        uniforms = row_uniforms(row_seeds, max_new_tokens).to(device) if row_seeds is not None else None
        eos = torch.tensor(self.eos_ids, device=device)

        ids = torch.full((rows, max_new_tokens), self.pad_id, dtype=torch.long, device=device)
        logprobs = torch.zeros(rows, max_new_tokens, dtype=torch.float32, device=device)
        finished = torch.zeros(rows, dtype=torch.bool, device=device)
        running = torch.arange(rows, device=device)  # rows still in the batch, by their place in the output
        cache = DynamicCache(config=self.model.config)
        width = prompt_ids.shape[1]
        logits = self.prefill(prompts, prompt_ids.to(device), attention[:, :width], positions[:, :width], cache)
        for t in range(max_new_tokens):
            chosen, chosen_logprobs = sample(logits, temperature, None if uniforms is None else uniforms[running, t])
            writing = ~finished[running]
            ids[running[writing], t] = chosen[writing]
            logprobs[running[writing], t] = chosen_logprobs[writing]
            finished[running] |= torch.isin(chosen, eos)
            still = ~finished[running]
            left = int(still.sum())
            if left == 0 or t + 1 == max_new_tokens:
                break
            if left <= 0.9 * len(running):  # each departure copies the cache: not for every single row
                keep = still.nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                running, chosen = running[keep], chosen[keep]
            seen = width + t + 1
            at = positions[running, seen - 1 : seen]
            logits = self.forward(chosen[:, None], attention[running, :seen], at, cache)

        ids, logprobs = ids[:, : t + 1].cpu(), logprobs[:, : t + 1].cpu()
        mask = completion_mask(ids, self.eos_ids)
        return Generated(ids, mask, torch.where(mask, logprobs, 0.0), finished.cpu())
