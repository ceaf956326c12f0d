"""A decode loop without batches: rows come and go between two tokens, and so do weights.

Rows of different length lie in one left-padded cache. A newcomer's prompt is prefilled (a group's once), padded to the
cache's width, or the cache to its, and joined along the batch dimension. Cached keys and values stay as they were
computed when weights change: a later token is sampled from a distribution that no single policy has.

    stream = HFStream(engine, max_new_tokens=8, temperature=0.7)
    stream.admit([StreamRow(0, [5, 6], (0, 1, 0))])
    ended = stream.tick()
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from overlaprl_ray.engines.hf import Generated, HFEngine, row_uniforms, sample
from overlaprl_ray.rollout import pad_left, pad_right, position_ids


@dataclasses.dataclass(eq=False)
class StreamRow:
    """One completion as it grows."""

    group: int
    prompt: Sequence[int]
    seed: Sequence[int]
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights that each token was sampled with
    finished: bool = False  # by an end-of-sequence token
    ended: bool = False  # by that, or by its length


def generated(rows: Sequence[StreamRow], pad_id: int) -> Generated:
    """Rows that have ended, as `HFEngine.generate` returns them."""
    ids, mask = pad_right([row.ids for row in rows], pad_id)
    logprobs, _ = pad_right([row.logprobs for row in rows], 0.0)
    return Generated(ids, mask, logprobs, torch.tensor([row.finished for row in rows]))


class HFStream:
    """The rows that run on an engine's model, under the weights that it holds."""

    def __init__(self, engine: HFEngine, max_new_tokens: int, temperature: float):
        self.engine, self.max_new_tokens, self.temperature = engine, max_new_tokens, temperature
        self.rows: list[StreamRow] = []  # in the cache; some may have ended
        self.admitted: list[StreamRow] = []  # to be prefilled in the next tick
        device = engine.device
        self.cache = DynamicCache(config=engine.model.config)
        self.attention = torch.zeros(0, 0, dtype=torch.bool, device=device)  # (b, W), columns of the cache
        self.uniforms = torch.zeros(0, max_new_tokens, dtype=torch.float64, device=device)

    def admit(self, rows: Sequence[StreamRow]) -> None:
        """Start rows with the next tick."""
        self.admitted += rows

    @torch.no_grad()
    def tick(self) -> list[StreamRow]:
        """One token for every row; returns the rows that ended with it."""
        self._drop_ended()
        logits = [self._decode()] if self.rows else []
        if self.admitted:
            logits.append(self._prefill())
        at = torch.tensor([min(len(row.ids), self.max_new_tokens - 1) for row in self.rows], device=self.engine.device)
        uniforms = self.uniforms.gather(1, at[:, None]).squeeze(1)
        tokens, logprobs = sample(torch.cat(logits), self.temperature, uniforms)
        chosen = zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        running = [(row, token, logprob) for row, token, logprob in chosen if not row.ended]
        for row, token, logprob in running:
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.engine.version)
            row.finished = token in self.engine.eos_ids
            row.ended = row.finished or len(row.ids) == self.max_new_tokens
        return [row for row, _, _ in running if row.ended]

    def refresh(self) -> None:
        """Compute all cached keys and values anew, under the weights that are held now."""
        self.start([row for row in self.rows if not row.ended])

    @torch.no_grad()
    def start(self, rows: list[StreamRow]) -> None:
        """Hold these rows, which run, and no others."""
        engine, device = self.engine, self.engine.device
        self.rows, self.cache = rows, DynamicCache(config=engine.model.config)
        if rows:
            texts = [[*row.prompt, *row.ids[:-1]] for row in rows]
            ids, self.attention = (part.to(device) for part in pad_left(texts, engine.pad_id))
            self.uniforms = row_uniforms([row.seed for row in rows], self.max_new_tokens).to(device)
            engine.forward(ids, self.attention, position_ids(self.attention), self.cache)

    def _drop_ended(self) -> None:
        """Drop ended rows from the cache; each time copies it, so it is not done for every single row."""
        left = [place for place, row in enumerate(self.rows) if not row.ended]
        if not left:
            self.rows, self.cache = [], DynamicCache(config=self.engine.model.config)
        elif self.admitted or len(left) <= 0.9 * len(self.rows):
            keep = torch.tensor(left, device=self.engine.device)
            self.cache.batch_select_indices(keep)
            self.attention, self.uniforms = self.attention[keep], self.uniforms[keep]
            self.rows = [self.rows[place] for place in left]

    def _decode(self) -> Tensor:
        """Logits (b, V) after the last token of every row in the cache."""
        last = torch.tensor([[row.ids[-1]] for row in self.rows], device=self.engine.device)
        self.attention = torch.nn.functional.pad(self.attention, (0, 1), value=True)
        positions = self.attention.sum(1, keepdim=True) - 1
        return self.engine.forward(last, self.attention, positions, self.cache)

    def _prefill(self) -> Tensor:
        """Logits (b, V) after the prompts of the rows admitted, which join the others."""
        engine, device = self.engine, self.engine.device
        prompts = [row.prompt for row in self.admitted]
        ids, mask = (part.to(device) for part in pad_left(prompts, engine.pad_id))
        cache = DynamicCache(config=engine.model.config)
        logits = engine.prefill(prompts, ids, mask, position_ids(mask), cache)
        uniforms = row_uniforms([row.seed for row in self.admitted], self.max_new_tokens).to(device)
        if self.rows:
            unused = int(self.attention.int().argmax(dim=1).min())  # columns on the left that no row needs any more
            cache = _join(self.cache, unused, cache, engine)
            mask = _stack(self.attention[:, unused:], mask, dim=1)
            uniforms = torch.cat([self.uniforms, uniforms])
        self.cache, self.attention, self.uniforms = cache, mask, uniforms
        self.rows, self.admitted = [*self.rows, *self.admitted], []
        return logits


def _join(old: DynamicCache, unused: int, new: DynamicCache, engine: HFEngine) -> DynamicCache:
    """One cache of the rows of both, the first one without its unused columns."""
    joined = DynamicCache(config=engine.model.config)
    layers: Any = zip(old.layers, new.layers, strict=True)
    for place, (left, right) in enumerate(layers):
        keys = _stack(left.keys[:, :, unused:], right.keys, dim=2)
        joined.update(keys, _stack(left.values[:, :, unused:], right.values, dim=2), place)
    return joined


def _stack(old: Tensor, new: Tensor, dim: int) -> Tensor:
    """The rows of both; what is narrower in a dimension gets zeros on the left."""
    width = max(old.shape[dim], new.shape[dim])
    after = [0, 0] * (old.dim() - dim - 1)
    parts = [torch.nn.functional.pad(part, [*after, width - part.shape[dim], 0]) for part in (old, new)]
    return torch.cat(parts)
