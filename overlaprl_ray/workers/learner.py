"""One training step on one rollout: judge it, then update the policy or leave it untouched. Knows no Ray.

learner = Learner(config, model)
learner.step(rollout, scores).metrics["reward"]     # `scores` from the reference model where beta > 0
"""

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from overlaprl_ray.algorithm.kl import staleness_kl
from overlaprl_ray.algorithm.loss import LossOutput, grpo_loss, normalizer
from overlaprl_ray.algorithm.rules import Gate, merge_gates
from overlaprl_ray.algorithm.schedule import Schedule, learning_rate, seeded_uniform
from overlaprl_ray.algorithm.staleness import StalenessScheduler
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.engines.base import check_logprobs
from overlaprl_ray.errors import BadBatch, RunError
from overlaprl_ray.models.loading import cpu_copy
from overlaprl_ray.models.logprobs import check_head, layouts_for, response_logprobs
from overlaprl_ray.models.lora import add_adapter, merged_copy, saver
from overlaprl_ray.rollout import Rollout, Scores, rows_of
from overlaprl_ray.workers.cells import cells_of
from overlaprl_ray.workers.memory import memory_gb
from overlaprl_ray.workers.metrics import StepTotals, rollout_metrics, samples_of
from overlaprl_ray.workers.micro_batches import MicroBatches, micro_batches
from overlaprl_ray.workers.optimizer import MasterAdamW
from overlaprl_ray.workers.results import StepResult
from overlaprl_ray.workers.updates import Update


class Learner:
    """Holds the policy and its optimizer. `version` counts optimizer updates, `floor` is the KL measured at lag 0."""

    def __init__(self, config: ExperimentConfig, model: PreTrainedModel):
        grpo = config.grpo
        check_head(model)
        self.adapter = add_adapter(config.model, config.seed, model) if config.model.lora_r else None
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()  # without it checkpointing is silently off; dropout is 0 all the same
        self.config, self.model, self.layouts = config, model, layouts_for(model)
        self.optimizer = MasterAdamW(model, grpo)
        self.scheduler = StalenessScheduler(config.staleness.model_copy(update={"rule": config.rule}))
        self.schedule = Schedule.of(config)
        self.version = 0
        self.floor: float | None = None

    def weights(self) -> dict[str, Tensor]:
        """The policy's trainable parameters by name, as views: copy them before the next step."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def saver(self) -> Callable[[str | Path], None]:
        """What writes the policy as it is now to a folder, though training goes on; under LoRA the adapter alone."""
        return self.master_copy().save_pretrained if self.adapter is None else saver(self.adapter)

    def master_copy(self) -> PreTrainedModel:
        """A plain copy of the policy in float32 on the CPU, the adapter merged into it where there is one."""
        if self.adapter is not None:
            return merged_copy(self.adapter)
        model = cpu_copy(self.model, dict(zip(self.optimizer.parameters, self.optimizer.masters, strict=True)))
        model.config.dtype = torch.float32
        return model

    def state(self) -> dict[str, Any]:
        """All that the next step depends on beside configuration and rollouts, as copies on the CPU."""
        return {
            "version": self.version,
            "floor": self.floor,
            "optimizer": self.optimizer.state(),
            "scheduler": self.scheduler.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.version = state["version"]
        self.optimizer.load(state["optimizer"])
        self.scheduler.load(state["scheduler"])
        if state["floor"] is not None:
            self._set_floor(state["floor"])

    def step(self, rollout: Rollout, scores: Scores | None = None) -> StepResult:
        """Judge one batch and train on it. Raises `RunError` on a loss or gradient that is not finite."""
        started = time.time()
        grpo = self.config.grpo
        if self.schedule.is_too_old(rollout.batch, rollout.weights_step):
            bound = self.schedule.oldest_token(rollout.batch)
            raise RunError(f"step {rollout.batch}: made after step {rollout.weights_step}, beyond the bound {bound}")
        lag = self.version - rollout.version  # in versions, as it is before the first of the updates
        totals, fault = StepTotals(), None
        slices = [slice(start, start + grpo.update_rows) for start in range(0, grpo.batch_rows, grpo.update_rows)]
        updates = [self._plan(rollout, scores, rows, lag) for rows in slices]
        lr = learning_rate(rollout.batch, grpo)
        try:
            self._prepare(rollout, updates)
            for iteration in range(grpo.num_iterations):
                for update in updates:
                    self._update(update, totals, lr, first=iteration == 0)
                    update.done = True
        except BadBatch as error:
            if self.config.pipeline.on_fault == "stop":
                raise
            fault = str(error)  # the rest of the batch is left
            self.optimizer.zero_grad()
            totals.drop_update()
        gate = merge_gates([update.final_gate() for update in updates])
        metrics = {
            "step": rollout.batch,
            "version": self.version,
            **rollout_metrics(rollout, grpo.group_size, lag),
            **totals.metrics(gate, lag, lr),
            "faults": int(fault is not None),
        }
        spans = {"load": rollout.load, "generate": rollout.generate, "train": (started, time.time())}
        memory = {"generator": rollout.memory_gb, "learner": memory_gb(self.model.device)}
        if scores:
            spans["reference"] = scores.span
            memory |= {"reference": scores.memory_gb} if scores.memory_gb is not None else {}
        samples = samples_of(rollout, self.config.output.completions_every, grpo.group_size)
        cells = cells_of(rollout, gate.decision, grpo.group_size, grpo.max_new_tokens)
        return StepResult(
            rollout.batch, metrics, spans, memory, samples, rollout.weights_step, cells, fault, self.floor
        )

    def _plan(self, rollout: Rollout, scores: Scores | None, rows: slice, lag: int) -> Update:
        reference = scores.logprobs[rows] if scores else None
        draw = seeded_uniform(self.config.seed, rollout.batch, rows.start)
        return Update(rows_of(rollout, rows), self.config, self.scheduler, lag, draw, reference, self.layouts.shares)

    def _prepare(self, rollout: Rollout, updates: list[Update]) -> None:
        """What is asked before the first update: is the batch sound, what is the floor, what is the proximal policy."""
        if rollout.fault:
            raise BadBatch(rollout.fault)
        if self.floor is None:
            self._set_floor(self._measure_floor(rollout))
        if self.config.grpo.correction != "none" and len(updates) > 1:
            # π_prox is the policy before the first of this batch's updates, for all of them
            for update in updates:
                update.proximal = self._logprobs(update.part, update.micros)

    def _update(self, update: Update, totals: StepTotals, lr: float, first: bool) -> None:
        """One optimizer update, or none where no row with a loss term is left."""
        grpo, part = self.config.grpo, update.part
        current = functools.partial(self._logprobs, part)
        if first:
            update.ask_before(current)
        if update.gate is None or update.gate.weight.any():
            whole = normalizer(grpo.loss_type, len(part.rewards), part.tokens, grpo.max_new_tokens)
            self.optimizer.zero_grad()
            totals.begin_update(part.completion_mask[update.skipped], first)
            seen = part.logprobs.clone()  # which rows that are skipped keep
            for rows, micro in update.micros:
                width = micro.logprobs.shape[1]
                layout = self.layouts(micro)
                logprobs, entropy = response_logprobs(self.model, micro, grpo.temperature, layout)
                seen[rows, :width] = logprobs.detach().cpu()
                _check_finite(seen[rows], micro)
                gate = update.ask(rows, micro, seen)
                loss = self._loss(update, rows, micro, logprobs, whole, gate)
                loss.loss.backward()
                self.optimizer.collect()
                totals.add_loss(loss, seen[rows, :width] - micro.logprobs, micro, layout, entropy, first)
            if first:
                update.ask_after(seen, current)
            self._apply(update, totals, lr)
        if first:
            update.record()

    def _loss(
        self, update: Update, rows: Tensor, micro: Rollout, logprobs: Tensor, whole: float, gate: Gate | None
    ) -> LossOutput:
        """A micro-batch's share of the update's loss, on the policy's device."""
        width = micro.logprobs.shape[1]

        def here(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(logprobs.device)

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows, :width]

        return grpo_loss(
            self.config.grpo,
            logprobs,
            micro.logprobs.to(logprobs.device),
            micro.advantages.to(logprobs.device),
            micro.completion_mask.to(logprobs.device),
            whole,
            proximal=here(cut(update.proximal)),
            reference=here(cut(update.reference)),
            row_weight=here(gate.weight if gate else None),
            keep=here(gate.keep if gate else None),
        )

    def _apply(self, update: Update, totals: StepTotals, lr: float) -> None:
        weight = update.weight
        if weight == 0.0:
            totals.drop_update()
            return self.optimizer.zero_grad()
        if update.grades_rows:  # clipping must not undo the rows' weights: the clip sees their mean gradient
            self.optimizer.scale(1 / weight)
        norm = self.optimizer.clip(self.config.grpo.max_grad_norm)
        if not math.isfinite(norm):
            raise BadBatch(
                f"step {update.part.batch}: the gradient's norm is {norm}; lower grpo.lr or grpo.temperature, or use "
                "float32"
            )
        self.optimizer.step(lr, weight, self.config.staleness.apply_to)
        self.version += 1
        totals.end_update(norm)

    @torch.no_grad()
    def _logprobs(self, part: Rollout, micros: MicroBatches) -> Tensor:
        """(B, T) logprobs of the micro-batches' rows under the policy as it is now, on the CPU; others keep theirs."""
        values = part.logprobs.clone()
        for rows, micro in micros:
            found, _ = response_logprobs(self.model, micro, self.config.grpo.temperature, self.layouts(micro))
            values[rows, : found.shape[1]] = found.cpu()
        return values

    def _measure_floor(self, rollout: Rollout) -> float:
        """The KL of the first batch: its generator held these very weights, so all of it is numerical mismatch."""
        logprobs = self._logprobs(rollout, micro_batches(rollout, self.config.grpo, self.config.judges_groups))
        _check_finite(logprobs, rollout)
        if self.config.model.engine == "vllm":
            check_logprobs(logprobs - rollout.logprobs, rollout.completion_mask, self.config.model.dtype)
        cap = self.config.staleness.kl_token_cap
        return float(staleness_kl(logprobs - rollout.logprobs, rollout.completion_mask, cap=cap))

    def _set_floor(self, floor: float) -> None:
        self.floor = floor
        if self.config.rule == "kl":
            self.scheduler.calibrate(floor)


def _check_finite(logprobs: Tensor, rows: Rollout) -> None:
    bad = (~logprobs.isfinite()).any(dim=1).nonzero().flatten().tolist()
    if bad:
        raise BadBatch(
            f"step {rows.batch}: the policy's logprobs are not finite for prompt {rows.prompts[bad[0]]!r:.80}, "
            f"completion {rows.completions[bad[0]]!r:.80} (and {len(bad) - 1} more rows); "
            "lower grpo.lr, or use model.dtype float32"
        )
