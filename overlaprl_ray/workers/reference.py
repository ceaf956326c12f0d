"""The frozen reference model: scores rollouts, changes nothing.

scores = Reference(config, model).score(rollout)
"""

import contextlib
import time
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.models.logprobs import check_head, layouts_for, response_logprobs
from overlaprl_ray.rollout import Rollout, Scores
from overlaprl_ray.workers.memory import memory_gb
from overlaprl_ray.workers.micro_batches import micro_batches

if TYPE_CHECKING:
    from peft import PeftModel


class Reference:
    """π_ref: the initial policy, or another model with the same vocabulary.

    With an `adapter` it is the base under it: `model` is the policy itself, scored with the adapter off and left as is.
    """

    def __init__(self, config: ExperimentConfig, model: PreTrainedModel, adapter: "PeftModel | None" = None):
        if adapter is None:  # else the model is the learner's, which has checked it
            check_head(model)
        self.config, self.adapter = config, adapter
        self.model = model if adapter else model.requires_grad_(False)
        self.layouts = layouts_for(model)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Scores:
        """Log π_ref of the completion tokens, (B, T), at the sampling temperature."""
        started = time.time()
        logprobs = torch.zeros_like(rollout.logprobs)
        with self.adapter.disable_adapter() if self.adapter else contextlib.nullcontext():
            for rows, part in micro_batches(
                rollout, self.config.grpo, self.config.judges_groups, shared=self.layouts.shares
            ):
                values, _ = response_logprobs(self.model, part, self.config.grpo.temperature, self.layouts(part))
                logprobs[rows, : values.shape[1]] = values.cpu()
        memory = None if self.adapter else memory_gb(self.model.device)  # the learner's own is told by it
        return Scores(logprobs, (started, time.time()), memory)
