"""How the rows of a micro-batch lie in the sequences that a model computes: each row alone, or a group's prompt once.

With `shared` a sequence is a prompt, then all completions to it that are in the micro-batch; each completion attends to
the prompt and to itself, and its positions go on from the prompt. A completion's last token predicts nothing that is
asked for, so it is not computed either. Which of the two is cheaper depends on the model and on lengths alone: a run
takes the same path whenever it is repeated.

    layout = Layouts(model, shares=True)(rollout)
    hidden = model.base_model(layout.ids, attention_mask=layout.attention(dtype), position_ids=layout.positions)
    predicting = hidden.last_hidden_state.flatten(0, 1)[layout.predicting]   # (N, H), a row per completion token
"""

import dataclasses
import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from overlaprl_ray.rollout import Rollout

PROMPT, PAD = 0, -1  # segments beside those of completions, which count from 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """n sequences of L positions, right-padded."""

    ids: Tensor  # (n, L) int64
    positions: Tensor  # (n, L) int64
    segments: Tensor  # (n, L) int64: PROMPT, a completion's number, or PAD
    predicting: Tensor  # (N,) int64 into n x L: the position that predicts each completion token, row by row
    shared: bool

    @property
    def real_tokens(self) -> int:
        """Positions that are no padding."""
        return int((self.segments != PAD).sum())

    def attention(self, dtype: torch.dtype) -> Tensor:
        """The mask: (n, L) int64 where every row is alone, else (n, 1, L, L), added to the scores."""
        if not self.shared:
            return (self.segments != PAD).long()
        key, query = self.segments[:, None, :], self.segments[:, :, None]
        length = self.segments.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=self.segments.device).tril()
        visible = earlier & ((key == PROMPT) | (key == query))  # padding sees padding: no row without a key
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )[:, None]


def lay_out(rollout: Rollout, shared: bool) -> Layout:
    """The sequences of these rows; `shared`: rows of one group in one sequence."""
    rows, width = rollout.completion_mask.shape
    prompts, inputs = rollout.prompt_mask.sum(1), (rollout.completion_mask.sum(1) - 1).clamp(min=0)
    owner = rollout.groups.unique(return_inverse=True)[1] if shared else torch.arange(rows)  # (B,) each row's sequence
    order = owner.argsort(stable=True)
    ends = inputs[order].cumsum(0)
    first = torch.searchsorted(owner[order], torch.arange(int(owner.max()) + 1))  # of each sequence, into `order`
    before = (ends - inputs[order]) - (ends - inputs[order])[first][owner[order]]  # tokens of earlier completions
    start = torch.empty_like(prompts)
    start[order] = prompts[order] + before
    lead = order[first]  # a row of each sequence
    length = int((start + inputs).max())

    ids = torch.zeros(len(lead), length, dtype=torch.long)
    segments = torch.full_like(ids, PAD)
    positions = torch.zeros_like(ids)
    steps = torch.arange(length).expand_as(ids)
    is_prompt = steps < prompts[lead, None]
    ids[is_prompt] = rollout.prompt_ids[lead][rollout.prompt_mask[lead]]
    segments[is_prompt] = PROMPT
    positions[is_prompt] = steps[is_prompt]
    offset = torch.arange(width).expand(rows, width)
    is_input = offset < inputs[:, None]
    place = (owner[:, None] * length + start[:, None] + offset)[is_input]
    ids.view(-1)[place] = rollout.completion_ids[is_input]
    segments.view(-1)[place] = (torch.arange(rows)[:, None] + 1).expand(rows, width)[is_input]
    positions.view(-1)[place] = (prompts[:, None] + offset)[is_input]
    # a completion's first token is predicted by the prompt's last, the others by the one before
    by_first = (owner * length + prompts - 1)[:, None]
    by_others = owner[:, None] * length + start[:, None] + offset - 1
    predicting = torch.where(offset == 0, by_first, by_others)[rollout.completion_mask]
    return Layout(ids, positions, segments, predicting, shared)


class Layouts:
    """Chooses between the two for one model, by what a forward costs. `shares`: whether it can share prompts at all."""

    def __init__(self, model: PreTrainedModel, shares: bool):
        config = model.config.get_text_config()
        embedding = next(model.get_input_embeddings().parameters()).numel()
        self.shares = shares
        self._per_token = 2.0 * (sum(p.numel() for p in model.base_model.parameters()) - embedding)
        width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0) or config.hidden_size
        self._per_pair = 4.0 * config.num_hidden_layers * width
        self._longest = getattr(config, "max_position_embeddings", None) or math.inf  # that a model is made for

    def __call__(self, rollout: Rollout) -> Layout:
        """The cheaper one for these rows."""
        return lay_out(rollout, self.shares and self.cost(rollout, True) < self.cost(rollout, False))

    def cost(self, rollout: Rollout, shared: bool) -> float:
        """Floating-point operations of a forward: two per weight and position, and attention over whole sequences.

        Infinite for a joined sequence beyond the model's window, though no position in it is.
        """
        prompts, inputs = rollout.prompt_mask.sum(1), (rollout.completion_mask.sum(1) - 1).clamp(min=0)
        if shared:
            names, owner = rollout.groups.unique(return_inverse=True)
            completions = torch.zeros(len(names), dtype=torch.long).index_add_(0, owner, inputs)
            prompts, inputs = torch.zeros_like(completions).index_put_((owner,), prompts), completions
        length = int((prompts + inputs).max())
        if shared and length > self._longest:
            return math.inf
        return len(prompts) * length * (self._per_token + self._per_pair * length)
