"""One training step on one rollout: judge it, then update the policy or leave it untouched. Knows no Ray.

learner = Learner(config, model)
result = learner.step(rollout, scores)     # `scores` from the reference model where beta > 0
result.metrics["reward"], learner.version
"""

import copy
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.decisions import cells_of
from overlaprl_ray.errors import BadBatch, RunError
from overlaprl_ray.kl import staleness_kl
from overlaprl_ray.logprobs import check_head, response_logprobs
from overlaprl_ray.loss import LossOutput, LossSettings, grpo_loss, normalizer
from overlaprl_ray.memory import memory_gb
from overlaprl_ray.metrics import StepResult, StepTotals, rollout_metrics, samples_of
from overlaprl_ray.optimizer import MasterAdamW
from overlaprl_ray.rollout import Rollout, Scores, micro_batches, rows_of
from overlaprl_ray.rules import Gate, GateInputs, discard_everything, keep_everything, merge_gates, timing
from overlaprl_ray.schedule import is_too_old
from overlaprl_ray.staleness import StalenessScheduler


@dataclass
class _Update:
    """What an update's first iteration fixes for the later ones: the gate's decision and the proximal logprobs."""

    gate: Gate | None = None
    done: bool = False
    proximal: Tensor | None = None


class Learner:
    """Holds the policy and its optimizer. `version` counts optimizer updates, `floor` is the KL measured at lag 0."""

    def __init__(self, config: ExperimentConfig, model: PreTrainedModel):
        grpo = config.grpo
        check_head(model)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()  # without it checkpointing is silently off; dropout is 0 all the same
        self.config, self.model = config, model
        self.optimizer = MasterAdamW(model, grpo.lr, grpo.weight_decay)
        staleness = config.staleness.model_copy(update={"rule": config.rule})
        self.scheduler = StalenessScheduler(staleness)
        self.timing = timing(staleness.rule, staleness.granularity)
        self.settings = LossSettings(
            clip_low=grpo.clip_eps,
            clip_high=grpo.clip_eps if grpo.clip_eps_high is None else grpo.clip_eps_high,
            dual_clip=grpo.dual_clip,
            beta=grpo.beta,
            kl_penalty=grpo.kl_penalty,
            loss_type=grpo.loss_type,
            importance_level=grpo.importance_level,
            correction=grpo.correction,
            correction_cap=grpo.correction_cap,
        )
        self.version = 0
        self.lag = 0  # versions between the generation of the batch in hand and the start of its step
        self.floor: float | None = None

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by name, as views: copy them before the next step."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def master_copy(self) -> PreTrainedModel:
        """A copy of the policy in float32, for saving while training goes on."""
        model = copy.deepcopy(self.model).float()
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter, master in zip(parameters, self.optimizer.masters, strict=True):
                parameter.copy_(master)
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
        if is_too_old(rollout.batch, rollout.weights_step, self.config.lag):
            raise RunError(
                f"step {rollout.batch}: made with the weights after step {rollout.weights_step}, "
                f"beyond lag {self.config.lag}"
            )
        lag = self.lag = self.version - rollout.version
        totals, fault = StepTotals(), None
        slices = [slice(start, start + grpo.update_rows) for start in range(0, grpo.batch_rows, grpo.update_rows)]
        updates = [_Update() for _ in slices]
        try:
            self._prepare(rollout, slices, updates)
            for iteration in range(grpo.num_iterations):
                for update, rows in zip(updates, slices, strict=True):
                    part = rows_of(rollout, rows)
                    reference = scores.logprobs[rows, : part.logprobs.shape[1]] if scores else None
                    self._update(part, reference, update, totals, first=iteration == 0)
                    update.done = True
        except BadBatch as error:
            if self.config.pipeline.on_fault == "stop":
                raise
            fault = str(error)  # the rest of the batch is left
            self.optimizer.zero_grad()
            totals.drop_update()
        gates = [update.gate if update.gate and update.done else discard_everything(grpo.update_rows)
                 for update in updates]  # fmt: skip
        gate = merge_gates([replace(gate, keep=None) for gate in gates])
        metrics = {
            "step": rollout.batch,
            "version": self.version,
            **rollout_metrics(rollout, grpo.group_size),
            **totals.metrics(gate, lag),
            "faults": int(fault is not None),
        }
        spans = {"load": rollout.load, "generate": rollout.generate, "train": (started, time.time())}
        memory = {"generator": rollout.memory_gb, "learner": memory_gb(self.model.device)}
        if scores:
            spans["reference"], memory["reference"] = scores.span, scores.memory_gb
        samples = samples_of(rollout, self.config.output.completions_every, grpo.group_size)
        cells = cells_of(rollout, gate.decision, grpo.group_size, grpo.max_new_tokens)
        return StepResult(
            rollout.batch, metrics, spans, memory, samples, rollout.weights_step, cells, fault, self.floor
        )

    def _prepare(self, rollout: Rollout, slices: list[slice], updates: list[_Update]) -> None:
        """What is asked before the first update: is the batch sound, what is the floor, what is the proximal policy."""
        if rollout.fault:
            raise BadBatch(rollout.fault)
        if self.floor is None:
            self._set_floor(self._measure_floor(rollout))
        if self.settings.correction != "none" and len(slices) > 1:
            # π_prox is the policy before the first of this batch's updates, for all of them
            for update, rows in zip(updates, slices, strict=True):
                update.proximal = self._logprobs(rows_of(rollout, rows))

    def _update(
        self, part: Rollout, reference: Tensor | None, update: _Update, totals: StepTotals, first: bool
    ) -> None:
        """One optimizer update, or none where the gate discards every row."""
        grpo = self.config.grpo
        micros = list(micro_batches(part, grpo.micro_batch_size))
        if first:
            update.gate = self._gate_before(part, len(micros))
        if update.gate is not None and not update.gate.weight.any():
            return self._record(update.gate, first)

        judge_rows = update.gate is None and self.timing != "after"
        whole = normalizer(grpo.loss_type, len(part.rewards), part.tokens, grpo.max_new_tokens)
        self.optimizer.zero_grad()
        seen, gates = torch.zeros_like(part.logprobs), []
        for rows, micro in micros:
            width = micro.logprobs.shape[1]
            logprobs, entropy = response_logprobs(self.model, micro, grpo.temperature)
            seen[rows, :width] = logprobs.detach().cpu()
            _check_finite(seen[rows], micro)
            log_ratio = seen[rows, :width] - micro.logprobs
            gate = update.gate.rows(rows, width) if update.gate else None
            if judge_rows:
                gate = self._judge(micro, log_ratio)
                gates.append(gate)
            proximal, scored = _cut(update.proximal, rows, width), _cut(reference, rows, width)
            loss = self._loss(micro, logprobs, whole, gate, proximal, scored)
            loss.loss.backward()
            self.optimizer.collect()
            totals.add_loss(loss, log_ratio, micro, entropy, first)
        if first:
            update.gate = merge_gates(gates) if gates else self._gate_after(part, seen, update.gate)
            update.proximal = seen if update.proximal is None else update.proximal
        assert update.gate is not None
        self._apply(part, update.gate, totals)
        self._record(update.gate, first)

    def _loss(
        self,
        micro: Rollout,
        logprobs: Tensor,
        whole: float,
        gate: Gate | None,
        proximal: Tensor | None,
        reference: Tensor | None,
    ) -> LossOutput:
        """A micro-batch's share of the update's loss, on the policy's device."""
        # the one weight of a whole batch comes after clipping, not here
        weight, keep = (gate.weight, gate.keep) if gate is not None and self.timing != "after" else (None, None)

        def here(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(logprobs.device)

        return grpo_loss(
            self.settings,
            logprobs,
            micro.logprobs.to(logprobs.device),
            micro.advantages.to(logprobs.device),
            micro.completion_mask.to(logprobs.device),
            whole,
            proximal=here(proximal),
            reference=here(reference),
            row_weight=here(weight),
            keep=here(keep),
        )

    def _gate_before(self, part: Rollout, micro_batches: int) -> Gate | None:
        """The verdict of a rule that must speak before any backward pass; None where it can wait."""
        if self.timing != "before":
            return None
        if self.scheduler.config.rule == "version":
            return self._judge(part, torch.zeros_like(part.logprobs))  # looks at the lag alone
        if micro_batches > 1:
            return self._judge(part, self._logprobs(part) - part.logprobs)
        return None  # the one micro-batch is the whole update: its own forward will do

    def _gate_after(self, part: Rollout, seen: Tensor, gate: Gate | None) -> Gate:
        """The verdict on a whole batch; or, of a rule that decided without a forward, the KL it did not need."""
        if gate is None:
            return self._judge(part, seen - part.logprobs)
        if gate.kl is None:
            measured = keep_everything(self._inputs(part, seen - part.logprobs), self.scheduler.config)
            return replace(gate, kl=measured.kl, signal_tokens=measured.signal_tokens)
        return gate

    def _apply(self, part: Rollout, gate: Gate, totals: StepTotals) -> None:
        if not gate.weight.any():
            totals.drop_update()
            return self.optimizer.zero_grad()
        norm = self.optimizer.clip(self.config.grpo.max_grad_norm)
        if not math.isfinite(norm):
            raise BadBatch(
                f"step {part.batch}: the gradient's norm is {norm}; lower grpo.lr or grpo.temperature, or use float32"
            )
        weight = float(gate.weight[0]) if self.timing == "after" else 1.0
        self.optimizer.step(weight, self.config.staleness.apply_to)
        self.version += 1
        totals.end_update(norm)

    def _judge(self, rows: Rollout, log_ratio: Tensor) -> Gate:
        return self.scheduler.judge(self._inputs(rows, log_ratio))

    def _inputs(self, rows: Rollout, log_ratio: Tensor) -> GateInputs:
        return GateInputs(log_ratio, rows.completion_mask, rows.advantages, rows.groups, self.lag)

    def _record(self, gate: Gate, first: bool) -> None:
        if first:
            self.scheduler.record(gate.verdict, float(gate.weight.mean()), gate.kl)

    @torch.no_grad()
    def _logprobs(self, part: Rollout) -> Tensor:
        """(B, T) logprobs under the policy as it is now, on the CPU."""
        values = torch.zeros_like(part.logprobs)
        for rows, micro in micro_batches(part, self.config.grpo.micro_batch_size):
            found, _ = response_logprobs(self.model, micro, self.config.grpo.temperature)
            values[rows, : found.shape[1]] = found.cpu()
        return values

    def _measure_floor(self, rollout: Rollout) -> float:
        """The KL of the first batch: its generator held these very weights, so all of it is numerical mismatch."""
        logprobs = self._logprobs(rollout)
        _check_finite(logprobs, rollout)
        return float(staleness_kl(logprobs - rollout.logprobs, rollout.completion_mask))

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


def _cut(values: Tensor | None, rows: slice, width: int) -> Tensor | None:
    return None if values is None else values[rows, :width]
