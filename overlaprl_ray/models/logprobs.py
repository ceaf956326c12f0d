"""Log-probabilities of completion tokens, without ever holding a B x T x V tensor.

The model's body runs once over prompt and completion; its output head then runs over the completion's real tokens
only, a chunk at a time, and is run again in backward (activation recomputation), so that peak memory does not grow
with tokens x vocabulary.

The one shift between logits and tokens is in layout.py: which position's hidden state predicts which token.

    logprobs, entropy = response_logprobs(model, rollout, temperature=1.0)
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from overlaprl_ray.models.layout import PAD, PROMPT, Layout, Layouts, lay_out
from overlaprl_ray.rollout import Rollout

CHUNK_LOGITS = 2**24  # logits per chunk: 64 MiB in float32; smaller ones only fragment a CPU's heap


def response_logprobs(
    model: PreTrainedModel, rollout: Rollout, temperature: float, layout: Layout | None = None
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy), each (B, T) float32 on the model's device and 0 where the completion mask is False.

    Both are of the distribution sampled from: softmax(logits / temperature). Gradients flow into `logprobs` alone.
    `layout` is how the rows lie in sequences; None = each row alone.
    """
    device = model.device
    layout = layout or lay_out(rollout, shared=False)
    mask = rollout.completion_mask.to(device)
    predicting = _hidden(model, layout)[layout.predicting.to(device)]  # (N, H): one row per real completion token
    targets = rollout.completion_ids.to(device)[mask]
    head = model.get_output_embeddings()
    rows = max(1, CHUNK_LOGITS // head.weight.shape[0])
    parts = []
    for start in range(0, len(targets), rows):
        chunk = predicting[start : start + rows], targets[start : start + rows], head, temperature
        recompute = torch.is_grad_enabled() and len(targets) > rows
        parts.append(checkpoint(_token_logprobs, *chunk, use_reentrant=False) if recompute else _token_logprobs(*chunk))
    flat_logprobs = torch.cat([part[0] for part in parts]) if parts else predicting.new_zeros(0, dtype=torch.float32)
    flat_entropy = torch.cat([part[1] for part in parts]) if parts else flat_logprobs
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    return empty.masked_scatter(mask, flat_logprobs), empty.masked_scatter(mask, flat_entropy)


def _hidden(model: PreTrainedModel, layout: Layout) -> Tensor:
    """(n L, H) last hidden states of a layout's positions."""
    states = model.base_model(
        input_ids=layout.ids.to(model.device),
        attention_mask=layout.attention(model.dtype).to(model.device),
        position_ids=layout.positions.to(model.device),
        use_cache=False,
    ).last_hidden_state
    return states.flatten(0, 1)


def _token_logprobs(hidden: Tensor, targets: Tensor, head: torch.nn.Module, temperature: float) -> tuple[Tensor, ...]:
    logits = head(hidden).float() / temperature  # (n, V)
    log_normalizer = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
    with torch.no_grad():
        probabilities = (logits - log_normalizer[:, None]).exp_()
        entropy = log_normalizer - probabilities.mul_(logits).sum(-1)
    return logprobs, entropy


@torch.no_grad()
def check_head(model: PreTrainedModel) -> float:
    """Largest difference between the model's own logits and head(body): not 0 for models that cap or scale logits.

    Raises `ValueError` where it exceeds rounding, since logprobs computed here would be of another distribution.
    """
    ids = torch.arange(4, device=model.device)[None] % model.get_output_embeddings().weight.shape[0]
    own = model(input_ids=ids, use_cache=False).logits.float()
    here = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    gap = float((own - here).abs().max())
    if gap > 1e-3 * float(own.abs().max().clamp(min=1)):
        raise ValueError(f"{type(model).__name__} changes its logits after the output head (by {gap:.3g}); unsupported")
    return gap


def layouts_for(model: PreTrainedModel) -> Layouts:
    """How rows are laid out for this model."""
    return Layouts(model, shares_prompts(model))


@torch.no_grad()
def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether completions can share a sequence with their prompt: full attention in every layer, and a probe agrees.

    A layer of another kind is found by its configuration: a probe as short as this would fit its window.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    limits = [name for name, value in config.to_dict().items() if value and _limits_attention(name)]
    if kinds != {"full_attention"} or limits or config._attn_implementation not in ("sdpa", "eager"):
        return False
    alone = _probe([[0, 1, 2, 3], [0, 1, 4, 5]], [[0, 1, 2, 3]] * 2, [[PROMPT, PROMPT, 1, 1], [PROMPT, PROMPT, 2, 2]])
    shared = _probe([[0, 1, 2, 3, 4, 5, 0]], [[0, 1, 2, 3, 2, 3, 0]], [[PROMPT, PROMPT, 1, 1, 2, 2, PAD]])
    try:
        expected, hidden = _hidden(model, alone), _hidden(model, shared)
    except (ValueError, RuntimeError):  # a model that does not take a mask of four dimensions
        return False
    gap = (hidden[[2, 3, 4, 5]] - expected[[2, 3, 6, 7]]).abs().max()
    return bool(gap <= (1e-3 if model.dtype == torch.float32 else 0.05) * expected.abs().max())


def _limits_attention(setting: str) -> bool:
    """Whether a model's setting keeps layers from looking back to the start; those count places, not positions."""
    windows = ("window" in setting or "chunk" in setting) and setting != "max_window_layers"
    return windows or setting in ("attention_types", "block_types", "layers_block_type")


def _probe(ids: list[list[int]], positions: list[list[int]], segments: list[list[int]]) -> Layout:
    """A layout made by hand; its sequences are shared where there is but one."""
    nothing = torch.arange(0)
    return Layout(torch.tensor(ids), torch.tensor(positions), torch.tensor(segments), nothing, shared=len(ids) == 1)
