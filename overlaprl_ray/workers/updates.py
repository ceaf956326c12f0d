"""One optimizer update of a step: its rows, when and on what its staleness rule is asked, and what weight results.

A rule speaks once per update, at the first iteration; later iterations keep what it said. Some must speak before any
backward pass, some micro-batch by micro-batch, some after the gradients are there (`rules.timing`).

    update = Update(part, config, scheduler, lag=1, draw=0.3)
    update.ask_before(logprobs_of); gate = update.ask(rows, micro, seen); update.ask_after(seen, logprobs_of)
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from overlaprl_ray.algorithm.rules import (
    Gate,
    GateInputs,
    discard_everything,
    keep_everything,
    merge_gates,
    timing,
)
from overlaprl_ray.algorithm.staleness import StalenessScheduler
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.rollout import Rollout, row_versions, rows_of
from overlaprl_ray.workers.micro_batches import MicroBatches, micro_batches, rows_with_signal

Logprobs = Callable[[MicroBatches], Tensor]  # (B, T) of the update's rows under the policy as it is now


class Update:
    """What is fixed for all iterations over these rows: micro-batches, gate, proximal and reference logprobs.

    Groups without signal (every advantage 0) have no gradient where beta is 0: they are in no micro-batch. They stay in
    the loss's normalizer and in the gate, and in what `kl` per batch and `ess` judge by (a forward without gradient).
    Under other rules the KL that is logged is of the computed rows alone.
    """

    def __init__(
        self,
        part: Rollout,
        config: ExperimentConfig,
        scheduler: StalenessScheduler,
        lag: int,
        draw: float = 0.0,
        reference: Tensor | None = None,
        shared: bool = False,
    ):
        self.part, self.scheduler, self.lag, self.draw = part, scheduler, lag, draw
        self.reference = None if reference is None else reference[:, : part.logprobs.shape[1]]
        self.timing = timing(scheduler.config.rule, scheduler.config.granularity)
        self.grades_rows = scheduler.config.rule == "kl" and self.timing == "rows"
        self.penalised = config.grpo.beta > 0
        everyone = torch.arange(len(part.rewards))
        computed = everyone if self.penalised else rows_with_signal(part)
        self.measured = torch.isin(everyone, computed)  # rows whose logprobs an update computes
        self.micros: MicroBatches = micro_batches(part, config.grpo, config.judges_groups, computed, shared)
        self.skipped = everyone[~self.measured]
        whole = self.timing == "after" and scheduler.config.rule != "none"  # judged by all rows, whatever came of them
        self.only_measured = micro_batches(part, config.grpo, rows=self.skipped, shared=shared) if whole else []
        self.gate: Gate | None = None
        self.proximal: Tensor | None = None  # (B, T) log π_prox
        self.done = False  # an iteration came to its end
        self._by_rows: list[tuple[Tensor, Gate]] = []

    def ask_before(self, logprobs: Logprobs) -> None:
        """Ask a rule that must speak before any backward."""
        if self.timing != "before":
            return
        if self.scheduler.config.rule in ("version", "random"):  # they look at no token
            self.gate = self._judge(self.part, torch.zeros_like(self.part.logprobs))
        elif len(self.micros) > 1:
            self.gate = self._judge(self.part, logprobs(self.micros) - self.part.logprobs, self.measured)

    def ask(self, rows: Tensor, micro: Rollout, seen: Tensor) -> Gate | None:
        """What a micro-batch's loss must know, from `seen` (B, T), logprobs that hold its rows; None: nothing yet."""
        width = micro.logprobs.shape[1]
        if self.gate is None and self.timing == "before":  # the only micro-batch: its own forward does
            self.gate = self._judge(self.part, seen - self.part.logprobs, self.measured)
        if self.gate is None and self.timing == "rows":
            self._by_rows.append((rows, self._judge(micro, seen[rows, :width] - micro.logprobs)))
            return self._by_rows[-1][1]
        # the one weight of a whole batch comes after clipping, not here
        return self.gate.rows(rows, width) if self.gate and self.timing != "after" else None

    def ask_after(self, seen: Tensor, logprobs: Logprobs) -> None:
        """The verdict on the update from `seen`, (B, T) logprobs of its rows (the behaviour's where skipped)."""
        measured = self.measured
        if self.only_measured:
            seen = torch.where(measured[:, None], seen, logprobs(self.only_measured))
            measured = torch.ones_like(measured)
        if self.gate is None and self.timing == "rows":
            self.gate = self._joined()
        elif self.gate is None:
            self.gate = self._judge(self.part, seen - self.part.logprobs, measured)
        elif self.gate.kl is None:  # decided without a forward: still say the KL
            inputs = self._inputs(self.part, seen - self.part.logprobs, measured)
            found = keep_everything(inputs, self.scheduler.config)
            self.gate = replace(self.gate, kl=found.kl, kl_tokens=found.kl_tokens, kl_max=found.kl_max)
        self.proximal = seen if self.proximal is None else self.proximal

    @property
    def weight(self) -> float:
        """w̄: how much of the update is applied, 0 for none at all: no row with a loss term is left.

        Of a weight per row it is the mean over the rows that have a loss term. Rival rules drop rows or tokens and
        leave the rest as it is: 1.
        """
        assert self.gate is not None
        has_loss = self.measured & self.part.completion_mask.any(dim=1)
        if not self.penalised:
            has_loss &= self.part.advantages != 0  # a group with signal can have rows without
        weights = self.gate.weight[has_loss]
        if not weights.any() or not (self.penalised or self._keeps_tokens(has_loss)):
            return 0.0
        return float(weights.mean()) if self.grades_rows or self.timing == "after" else 1.0

    def _keeps_tokens(self, rows: Tensor) -> bool:
        assert self.gate is not None
        return self.gate.keep is None or bool((self.gate.keep & self.part.completion_mask)[rows].any())

    def record(self) -> None:
        """Have the scheduler count what was decided."""
        assert self.gate is not None
        self.scheduler.record(self.gate.verdict, float(self.gate.weight.mean()), self.gate.kl)

    def final_gate(self) -> Gate:
        """What became of the rows: all discarded where the update was not carried through. Without `keep`."""
        if self.gate is None or not self.done:
            return discard_everything(len(self.part.rewards))
        return replace(self.gate, keep=None)

    def _joined(self) -> Gate:
        """The gates of micro-batches and skipped rows as one, in row order."""
        gates = list(self._by_rows)
        if len(self.skipped):
            idle = rows_of(self.part, self.skipped)
            nobody = torch.zeros(len(self.skipped), dtype=torch.bool)
            gates.append((self.skipped, self._judge(idle, torch.zeros_like(idle.logprobs), nobody)))
        order = torch.cat([rows for rows, _ in gates]).argsort()
        return merge_gates([gate for _, gate in gates]).rows(order, self.part.logprobs.shape[1])

    def _judge(self, rows: Rollout, log_ratio: Tensor, measured: Tensor | None = None) -> Gate:
        return self.scheduler.judge(self._inputs(rows, log_ratio, measured))

    def _inputs(self, rows: Rollout, log_ratio: Tensor, measured: Tensor | None) -> GateInputs:
        lag = self.lag + rows.version - row_versions(rows)  # of each row's oldest token
        return GateInputs(log_ratio, rows.completion_mask, rows.advantages, rows.groups, lag, measured, self.draw)
