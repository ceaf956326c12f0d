"""Log-probabilities of completion tokens, without ever holding a B x T x V tensor.

The model's body runs once over prompt and completion; its output head then runs over the completion's real tokens
only, a chunk at a time, and is run again in backward (activation recomputation), so that peak memory does not grow
with tokens x vocabulary.

The one shift between logits and tokens of the whole package is here: the hidden state at position i predicts token i+1.

    logprobs, entropy = response_logprobs(model, rollout, temperature=1.0)
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from overlaprl_ray.rollout import Rollout, position_ids

CHUNK_LOGITS = 2**24  # logits per chunk: 64 MiB in float32; smaller ones only fragment a CPU's heap


def response_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy), each (B, T) float32 on the model's device and 0 where the completion mask is False.

    Both are of the distribution sampled from: softmax(logits / temperature). Gradients flow into `logprobs` alone.
    """
    device = model.device
    mask = rollout.completion_mask.to(device)
    sequence = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1).to(device)
    attention = torch.cat([rollout.prompt_mask.to(device), mask], dim=1)
    hidden = model.base_model(
        input_ids=sequence,
        attention_mask=attention.long(),
        position_ids=position_ids(attention),
        use_cache=False,
    ).last_hidden_state
    predicting = hidden[:, -mask.shape[1] - 1 : -1][mask]  # (N, H): one row per real completion token
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
