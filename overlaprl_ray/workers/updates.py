"""One optimizer update of a step: its rows, and when and on what its staleness rule is asked.

A rule speaks once per update, at the first iteration; later iterations keep what it said. Some must speak before any
backward pass, some micro-batch by micro-batch, some after the gradients are there (`rules.timing`).

    update = Update(rows_of(rollout, rows), config, scheduler, lag=1)
    update.ask_before(logprobs_of); gate = update.ask(rows, micro, seen); update.ask_after(seen)
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from overlaprl_ray.algorithm.rules import Gate, GateInputs, discard_everything, keep_everything, merge_gates, timing
from overlaprl_ray.algorithm.staleness import StalenessScheduler
from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.rollout import Rollout, rows_of
from overlaprl_ray.workers.micro_batches import MicroBatches, micro_batches, rows_with_signal


class Update:
    """What is fixed for all iterations over these rows: micro-batches, gate, proximal and reference logprobs.

    Groups without signal (every advantage 0) have no gradient where beta is 0: they are in no micro-batch. Nothing that
    a rule decides or the KL measures depends on their logprobs; they stay in the loss's normalizer and in the gate.
    """

    def __init__(
        self,
        part: Rollout,
        config: ExperimentConfig,
        scheduler: StalenessScheduler,
        lag: int,
        reference: Tensor | None = None,
    ):
        self.part, self.scheduler, self.lag = part, scheduler, lag
        self.reference = None if reference is None else reference[:, : part.logprobs.shape[1]]
        self.timing = timing(scheduler.config.rule, scheduler.config.granularity)
        computed = rows_with_signal(part) if config.grpo.beta == 0 else torch.arange(len(part.rewards))
        self.micros: MicroBatches = micro_batches(part, config.grpo, config.judges_groups, computed)
        idle = torch.ones(len(part.rewards), dtype=torch.bool)
        idle[computed] = False
        self.skipped = idle.nonzero().flatten()  # row ids
        self.gate: Gate | None = None
        self.proximal: Tensor | None = None  # (B, T) log π_prox
        self.done = False  # an iteration came to its end
        self._by_rows: list[tuple[Tensor, Gate]] = []

    def ask_before(self, logprobs: Callable[[], Tensor]) -> None:
        """Ask a rule that must speak before any backward; `logprobs` computes the rows' (B, T) under the policy."""
        if self.timing != "before":
            return
        if self.scheduler.config.rule == "version":
            self.gate = self._judge(self.part, torch.zeros_like(self.part.logprobs))  # looks at the lag alone
        elif len(self.micros) > 1:
            self.gate = self._judge(self.part, logprobs() - self.part.logprobs)

    def ask(self, rows: Tensor, micro: Rollout, seen: Tensor) -> Gate | None:
        """What a micro-batch's loss must know, from `seen` (B, T), logprobs that hold its rows; None: nothing yet."""
        width = micro.logprobs.shape[1]
        if self.gate is None and self.timing == "before":  # the only micro-batch: its own forward does
            self.gate = self._judge(self.part, seen - self.part.logprobs)
        if self.gate is None and self.timing == "rows":
            self._by_rows.append((rows, self._judge(micro, seen[rows, :width] - micro.logprobs)))
            return self._by_rows[-1][1]
        # the one weight of a whole batch comes after clipping, not here
        return self.gate.rows(rows, width) if self.gate and self.timing != "after" else None

    def ask_after(self, seen: Tensor) -> None:
        """The verdict on the update from `seen`, (B, T) logprobs of its rows (the behaviour's where skipped)."""
        if self.gate is None and self.timing == "rows":
            self.gate = self._joined()
        elif self.gate is None:
            self.gate = self._judge(self.part, seen - self.part.logprobs)
        elif self.gate.kl is None:  # decided without a forward: still say the KL
            measured = keep_everything(self._inputs(self.part, seen - self.part.logprobs), self.scheduler.config)
            self.gate = replace(self.gate, kl=measured.kl, signal_tokens=measured.signal_tokens)
        self.proximal = seen if self.proximal is None else self.proximal

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
            gates.append((self.skipped, self._judge(idle, torch.zeros_like(idle.logprobs))))
        order = torch.cat([rows for rows, _ in gates]).argsort()
        return merge_gates([gate for _, gate in gates]).rows(order, self.part.logprobs.shape[1])

    def _judge(self, rows: Rollout, log_ratio: Tensor) -> Gate:
        return self.scheduler.judge(self._inputs(rows, log_ratio))

    def _inputs(self, rows: Rollout, log_ratio: Tensor) -> GateInputs:
        return GateInputs(log_ratio, rows.completion_mask, rows.advantages, rows.groups, self.lag)
