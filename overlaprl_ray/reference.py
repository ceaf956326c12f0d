"""The frozen reference model: scores rollouts, changes nothing.

scores = Reference(config, model).score(rollout)
"""

import time

import torch
from transformers import PreTrainedModel

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.logprobs import response_logprobs
from overlaprl_ray.memory import memory_gb
from overlaprl_ray.rollout import Rollout, Scores, micro_batches


class Reference:
    """π_ref: the initial policy, or another model with the same vocabulary."""

    def __init__(self, config: ExperimentConfig, model: PreTrainedModel):
        self.config = config
        self.model = model.requires_grad_(False)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Scores:
        """Log π_ref of the completion tokens, (B, T), at the sampling temperature."""
        started = time.time()
        logprobs = torch.zeros_like(rollout.logprobs)
        for rows, part in micro_batches(rollout, self.config.grpo.micro_batch_size):
            values, _ = response_logprobs(self.model, part, self.config.grpo.temperature)
            logprobs[rows, : values.shape[1]] = values.cpu()
        return Scores(logprobs, (started, time.time()), memory_gb(self.model.device))
