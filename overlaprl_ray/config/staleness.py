"""How stale rollouts are judged: the rule, its thresholds, and what its weight scales."""

from typing import Literal

from pydantic import Field, model_validator

from overlaprl_ray.config.grpo import Group, NonNegative, Positive, Share, Whole

Decision = Literal["fresh", "stale", "discard"]
DECISIONS: tuple[Decision, ...] = ("fresh", "stale", "discard")  # a row's decision is an index into this


class StalenessConfig(Group):
    """What happens to a rollout whose policy has drifted away (modes `staleness` and `overlap`)."""

    rule: Literal["none", "kl", "version", "opsm", "m2po", "ess", "random"] = Field(
        "kl", description="how a rollout is judged"
    )
    kl_fresh: NonNegative = Field(0.05, description="below this KL (>= 0) a rollout counts in full")
    kl_stale: Positive = Field(0.15, description="from this KL (> 0) on it is discarded; > kl_fresh")
    min_weight: float = Field(0.1, ge=0, le=1, description="weight just below kl_stale, 0 to 1")
    threshold_unit: Literal["nats", "floor"] = Field(
        "nats",
        description="unit of kl_fresh and kl_stale: nats per token, or multiples of the numerical floor "
        "(for bfloat16, where it is about 1e-3 nats; in float32 it is too small to be a unit)",
    )
    kl_token_cap: Positive | None = Field(1.0, description="most that a token adds to the KL, nats, > 0; null = no cap")
    granularity: Literal["batch", "group", "sequence"] = Field("batch", description="what is judged as one")
    apply_to: Literal["update", "loss", "lr"] = Field(
        "update",
        description="what a weight w scales: AdamW's first moment (w of the influence, whether steady or lone), the "
        "gradient (a steady w cancels in AdamW), or that step's learning rate (a lone w = 0.1 leaves 0.91: momentum "
        "delivers the rest later)",
    )
    max_lag: Whole = Field(4, description="rule version: drop a rollout more than this many versions (>= 0) old")
    opsm_delta: NonNegative = Field(1e-4, description="rule opsm: drop rows with A < 0 and mean log-ratio beyond, >= 0")
    m2po_tau: Positive = Field(0.04, description="rule m2po: bound on the mean squared log-ratio, > 0")

    discard_probability: Share = Field(0.1, description="rule random: chance of discarding an update's batch, 0 to 1")

    @model_validator(mode="after")
    def _check(self) -> "StalenessConfig":
        if self.kl_fresh >= self.kl_stale:
            raise ValueError(f"kl_fresh={self.kl_fresh} must be below kl_stale={self.kl_stale}; try 0.05 and 0.15")
        if self.apply_to == "lr" and self.granularity != "batch":
            raise ValueError(
                f"apply_to=lr cannot be combined with granularity={self.granularity}: a step has one learning rate; "
                "use apply_to=update"
            )
        if self.apply_to == "lr" and self.rule not in ("kl", "ess"):
            raise ValueError(f"apply_to=lr cannot be combined with rule={self.rule}, only with kl and ess; use update")
        if self.rule == "ess" and self.apply_to != "lr":
            raise ValueError(f"rule=ess scales the learning rate, not apply_to={self.apply_to}; use apply_to=lr")
        return self
