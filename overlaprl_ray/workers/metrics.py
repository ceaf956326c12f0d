"""The numbers of a step: what a rollout says by itself, and what its updates add up to. Names as in TRL.

rollout_metrics(rollout, group_size=8)["frac_reward_zero_std"]
"""

import dataclasses
import math
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from overlaprl_ray.algorithm.kl import effective_sample_size, masked_mean, staleness_kl
from overlaprl_ray.algorithm.loss import LossOutput
from overlaprl_ray.algorithm.rules import Gate
from overlaprl_ray.models.layout import Layout
from overlaprl_ray.rollout import Rollout, Unused, crossed

LOSS_SUMS = ("loss", "policy_loss", "kl_ref", "clip_low", "clip_high", "tokens")  # fields of LossOutput that add up


def rollout_metrics(rollout: Rollout, group_size: int, lag: int = 0) -> dict[str, Any]:
    """Rewards and lengths of a batch, and the ages of its tokens where they differ; `lag` is that of the oldest.

    `reward_std` is the mean of the groups' standard deviations. Tokens, samples, reward and the share of groups without
    signal are of all that was generated, used or not. Rows that nobody judged (NaN) are left out of the means of
    rewards; None where no row was judged.
    """
    groups = rollout.rewards.double().reshape(-1, group_size)
    lengths = rollout.completion_mask.sum(1).double()
    unused = rollout.unused or Unused(0, 0, 0, 0.0, 0)
    samples = len(rollout.rewards) + unused.rows
    judged = int((~rollout.rewards.isnan()).sum()) + unused.judged
    silent = int((rollout.advantages.reshape(-1, group_size) == 0).all(1).sum()) + unused.silent_groups
    return {
        "weights_step": rollout.weights_step,
        "tokens": rollout.tokens + unused.tokens,
        "samples": samples,
        "tokens_unused": unused.tokens,
        "reward": (float(rollout.rewards.double().nan_to_num().sum()) + unused.reward) / judged if judged else None,
        "reward_std": _mean_judged(groups.std(dim=1) if judged == samples else _spread(groups)),
        "frac_reward_zero_std": silent * group_size / samples,
        "completions/mean_length": float(lengths.mean()),
        "completions/clipped_ratio": float(1 - rollout.finished.double().mean()),
        **{f"rewards/{name}/mean": _mean_judged(part) for name, part in rollout.reward_parts.items()},
        **{
            f"logged/{name}": fmean(numbers)
            for name, values in rollout.logged.items()
            if (numbers := [value for value in values if isinstance(value, int | float)])
        },
        **(_ages(rollout, lag) if rollout.versions is not None else {}),
    }


def _ages(rollout: Rollout, lag: int) -> dict[str, Any]:
    """Of a stream's batch: versions between each token and now, and the share of tokens whose row crossed an update."""
    assert rollout.versions is not None
    mask = rollout.completion_mask
    ages = (lag + rollout.version - rollout.versions)[mask].double()
    return {
        "staleness/lag_mean": float(ages.mean()),
        "staleness/lag_p95": float(ages.quantile(0.95)),
        "staleness/kl_crossed": None,  # unless measured, see StepTotals
        "staleness/kl_whole": None,
        "stream/frac_crossed": float(mask[crossed(rollout)].sum() / mask.sum()),
        **rollout.stream,
    }


def _mean_judged(values: Tensor) -> float | None:
    judged = values.double()[~values.isnan()]
    return float(judged.mean()) if len(judged) else None


def _spread(groups: Tensor) -> Tensor:
    judged = [group[~group.isnan()] for group in groups]
    return torch.tensor([float(group.std()) if len(group) > 1 else math.nan for group in judged])


@dataclasses.dataclass
class StepTotals:
    """Sums over the micro-batches and updates of one step. First forwards give ratio, entropy and ESS.

    These three are of the rows that were computed: without those of `rows_skipped`, whose groups have no signal.
    """

    losses: list[dict[str, float]] = dataclasses.field(default_factory=list)  # of the updates that happened
    log_ratios: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    crossed: list[Tensor] | None = None  # of a stream's rows, (b,) bool: whether weights changed between their tokens
    entropy_sum: float = 0.0
    first_tokens: int = 0
    ratio_sum: float = 0.0
    computed_tokens: int = 0  # of all updates' forwards, padding included
    real_tokens: int = 0
    rows_skipped: int = 0
    current: dict[str, float] = dataclasses.field(default_factory=dict)

    def begin_update(self, skipped: Tensor, first: bool) -> None:
        """An update of which rows with these completion masks, (b, T), are not computed; they still count."""
        self.current = {**dict.fromkeys(LOSS_SUMS, 0.0), "tokens": float(skipped.sum())}
        self.rows_skipped += len(skipped) if first else 0

    def add_loss(
        self, loss: LossOutput, log_ratio: Tensor, micro: Rollout, layout: Layout, entropy: Tensor, first: bool
    ) -> None:
        """One micro-batch's forward."""
        self.computed_tokens += layout.ids.numel()
        self.real_tokens += layout.real_tokens
        for name in LOSS_SUMS:
            self.current[name] += float(getattr(loss, name).detach())
        if first:
            self.log_ratios.append((log_ratio, micro.completion_mask))
            if micro.versions is not None:
                self.crossed = [*(self.crossed or []), crossed(micro)]
            self.entropy_sum += float(entropy.double().sum())
            self.ratio_sum += float(loss.ratio_sum)
            self.first_tokens += int(loss.tokens)

    def end_update(self, grad_norm: float) -> None:
        """The micro-batches since the last update became one."""
        self.losses.append({**self.current, "grad_norm": grad_norm})
        self.current = {}

    def drop_update(self) -> None:
        """The micro-batches since the last update were discarded."""
        self.current = {}

    def metrics(self, gate: Gate, lag: int, lr: float) -> dict[str, Any]:
        """The step's row; what a discarded step does not have is None."""
        tokens = sum(update["tokens"] for update in self.losses)

        def mean(name: str) -> float | None:
            return sum(update[name] for update in self.losses) / len(self.losses) if self.losses else None

        def per_token(name: str) -> float | None:
            return sum(update[name] for update in self.losses) / tokens if tokens else None

        # a sequence's weight is the geometric mean of its tokens' ratios, so that length does not matter
        weights = [masked_mean(ratio.double(), mask, dim=1)[mask.any(dim=1)] for ratio, mask in self.log_ratios]
        fractions = gate.fractions
        first = max(self.first_tokens, 1)
        return {
            "loss": mean("loss"),
            "policy_loss": mean("policy_loss"),
            "kl_ref": per_token("kl_ref"),
            "entropy": self.entropy_sum / first if self.log_ratios else None,
            "grad_norm": mean("grad_norm"),
            "lr": lr,
            "clip_ratio/low": per_token("clip_low"),
            "clip_ratio/high": per_token("clip_high"),
            "ratio/mean": self.ratio_sum / first if self.log_ratios else None,
            "tokens_computed": self.computed_tokens,
            "padding_waste": 1 - self.real_tokens / self.computed_tokens if self.computed_tokens else None,
            "rows_skipped": self.rows_skipped,
            "ess": effective_sample_size(torch.cat(weights)) if weights else None,
            "staleness/lag": lag,
            "staleness/kl": gate.kl,
            "staleness/kl_max": gate.kl_max,
            "staleness/weight": float(gate.weight.mean()),
            "staleness/decision": gate.verdict,
            "staleness/frac_fresh": fractions["fresh"],
            "staleness/frac_stale": fractions["stale"],
            "staleness/frac_discarded": fractions["discard"],
            **self._kl_by_crossing(),
        }

    def _kl_by_crossing(self) -> dict[str, float | None]:
        """Of a stream: KL(μ || π), nats per token, of the rows that crossed an update and of those that did not.

        The μ of a row that crossed is what its tokens were sampled from: old keys and values under newer weights.
        """
        if self.crossed is None:
            return {}
        ratio = torch.cat([ratio[mask] for ratio, mask in self.log_ratios])
        masks = (mask for _, mask in self.log_ratios)
        rows = torch.cat([rows[:, None].expand_as(m)[m] for rows, m in zip(self.crossed, masks, strict=True)])
        parts = {"staleness/kl_crossed": rows, "staleness/kl_whole": ~rows}
        return {name: float(staleness_kl(ratio, part)) if part.any() else None for name, part in parts.items()}


def samples_of(rollout: Rollout, every: int, group_size: int) -> list[dict[str, Any]]:
    """The first group of a batch as rows of completions.jsonl, at every `every`-th step from the first (0: never)."""
    if every == 0 or (rollout.batch - 1) % every:
        return []
    return [_sample(rollout, row) for row in range(group_size)]


def _sample(rollout: Rollout, row: int) -> dict[str, Any]:
    return {
        "step": rollout.batch,
        "prompt": rollout.prompts[row],
        "completion": rollout.completions[row],
        "answer": rollout.answers[row],
        "extracted": rollout.extracted[row],
        "reward": _mean_judged(rollout.rewards[row : row + 1]),
        "rewards": {name: _mean_judged(part[row : row + 1]) for name, part in rollout.reward_parts.items()},
        "advantage": float(rollout.advantages[row]),
        "tokens": int(rollout.completion_mask[row].sum()),
        "version": rollout.version,
        **({"logged": {name: values[row] for name, values in rollout.logged.items()}} if rollout.logged else {}),
    }
