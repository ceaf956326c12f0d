"""The loss and its gradient against TRL's own `GRPOTrainer._compute_loss`, called on the same float64 tensors."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from overlaprl_ray.algorithm.advantages import group_advantages
from overlaprl_ray.algorithm.loss import grpo_loss, normalizer
from overlaprl_ray.config import GRPOConfig

pytest.importorskip("trl")
from trl import GRPOTrainer

MAX_NEW_TOKENS = 7
ROWS = 8


def trl_loss(settings: GRPOConfig, logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """TRL's loss of one process without gradient accumulation, with given logprobs in place of a model's."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=settings.dual_clip,
            use_bias_correction_kl=settings.use_bias_correction_kl,
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
        ),
        _metrics={"train": defaultdict(list)},
        loss_type=settings.loss_type,
        importance_sampling_level=settings.importance_level,
        beta=settings.beta,
        epsilon_low=settings.clip_eps,
        epsilon_high=(1 if settings.loss_type == "cispo" else 0) + settings.clip_eps_high,  # theirs is the cap itself
        max_completion_length=MAX_NEW_TOKENS,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("importance_level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("dual_clip", [None, 1.6])
def test_loss_and_gradient_equal_trl(
    loss_type: Any, importance_level: Any, beta: float, dual_clip: float | None
) -> None:
    """With the penalty's ratio on in both arms, except at sequence level: there TRL takes the sequence's ratio for it,
    which is not the token's π/μ that makes the penalty right given its prefix."""
    if loss_type == "cispo" and dual_clip:
        pytest.skip("refused: CISPO clips no term, so there is nothing to clip twice")
    generator = torch.Generator().manual_seed(0)
    logprobs, behaviour, reference = (
        -2 + 0.6 * torch.randn(ROWS, MAX_NEW_TOKENS, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    advantages = group_advantages(torch.rand(ROWS, dtype=torch.float64, generator=generator), group_size=4)
    mask = torch.arange(MAX_NEW_TOKENS) < torch.tensor([7, 1, 3, 5, 2, 7, 4, 6])[:, None]
    settings = GRPOConfig(
        clip_eps=0.2,
        clip_eps_high=0.28,
        dual_clip=dual_clip,
        beta=beta,
        kl_penalty="k3",
        use_bias_correction_kl=importance_level == "token",
        loss_type=loss_type,
        importance_level=importance_level,
        correction="none",
        correction_cap=2.0,
    )

    theirs_at = logprobs.clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, MAX_NEW_TOKENS, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": behaviour,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    theirs = trl_loss(settings, theirs_at, inputs)
    theirs.backward()

    ours_at = logprobs.clone().requires_grad_()
    whole = normalizer(loss_type, ROWS, int(mask.sum()), MAX_NEW_TOKENS)
    ours = grpo_loss(settings, ours_at, behaviour, advantages, mask, whole, reference=reference if beta else None)
    ours.loss.backward()

    assert theirs_at.grad is not None
    assert theirs_at.grad.any()
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours_at.grad, theirs_at.grad, rtol=1e-10, atol=1e-10)
