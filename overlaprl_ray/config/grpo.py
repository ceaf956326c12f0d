"""The algorithm's settings, and what every group of settings has in common: closed to unknown keys, limits on all.

`experiment.py` has the other groups and the run as a whole.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

TINY = "tiny"  # the built-in model: made and warm-started here, downloaded from nowhere

# What the built-in model wants instead of the defaults below, which are meant for pretrained models.
TINY_DEFAULTS: dict[str, Any] = {
    "lr": 4e-4,
    "lr_warmup_steps": 20,
    "num_steps": 250,
    "num_prompts_per_step": 32,
    "max_new_tokens": 5,
    "temperature": 1.0,
    "beta": 0.001,
    "micro_batch_size": None,
}

# The upper limits are far beyond any use: they catch a slip before a machine's memory or a timer does.
# A Field beside one of these must not set the same limit again: this one would win.
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Whole = Annotated[int, Field(ge=0, le=10**6)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class Group(BaseModel):
    """A group of settings: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _keep_bools_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """`num_steps: yes` is a slip, though pydantic would take it for 1 (and 1 for true)."""
        wants_bool = cls.model_fields[info.field_name or ""].annotation is bool
        if isinstance(value, bool) != wants_bool:
            kind = "true or false" if wants_bool else "neither true nor false"
            raise PydanticCustomError("bool_type", "input should be {kind}", {"kind": kind})
        return value

    def with_setting(self, name: str, value: Any) -> Self:
        """A copy with one setting changed, by its dotted name: `config.with_setting("output.dir", "runs/x")`."""
        field, _, rest = name.partition(".")
        return self.model_copy(update={field: getattr(self, field).with_setting(rest, value) if rest else value})


class GRPOConfig(Group):
    """The algorithm: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) and its known variants."""

    model_name: str = Field(TINY, description=f"'{TINY}' (built in), a model folder, or a Hugging Face hub name")
    lr: float = Field(1e-5, gt=0, le=1, description="AdamW's learning rate, > 0 and at most 1")
    lr_warmup_steps: Whole = Field(10, description="steps over which the rate rises linearly to lr, >= 0")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="the rate after warm-up: constant, or falling to lr * lr_min_ratio over num_steps"
    )
    lr_min_ratio: float = Field(0.0, ge=0, le=1, description="linear and cosine: the rate at the end over lr, 0 to 1")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment, 0 to below 1")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay of the second moment, 0 to below 1")
    adam_eps: float = Field(1e-8, gt=0, le=1, description="AdamW's epsilon, > 0 and at most 1")
    num_steps: Count = Field(50, description="steps: batches judged and trained on or discarded, >= 1")
    num_prompts_per_step: Count = Field(4, description="P: prompts per batch, >= 1")
    group_size: int = Field(8, ge=2, le=10**6, description="G: completions per prompt, >= 2: one has no advantage")
    oversample: float = Field(
        1.0,
        ge=1,
        le=16,
        description="dynamic sampling: generate so many times the prompts, 1 to 16, and train on the first P groups "
        "with a signal, filled up with groups without",
    )
    max_new_tokens: Count = Field(256, description="longest completion, tokens, >= 1")
    temperature: float = Field(0.7, ge=0.01, le=100, description="of sampling and of all logprobs, 0.01 to 100")
    clip_eps: NonNegative | None = Field(0.2, lt=1, description="lower clip range of the ratio, 0 to 1; null = no clip")
    clip_eps_high: NonNegative | None = Field(None, description="upper clip range of the ratio, >= 0; null = clip_eps")
    dual_clip: Positive | None = Field(None, gt=1, description="cap on the ratio where A < 0, > 1; null = off")
    beta: NonNegative = Field(0.04, description="weight of the reference penalty, >= 0; 0 = no reference model at all")
    kl_penalty: Literal["k2", "k3", "straight_through"] = Field(
        "k3", description="reference penalty; straight_through = value of k3, gradient of k2"
    )
    use_bias_correction_kl: bool = Field(
        True, description="multiply each token's reference penalty by its ratio to the generating policy, as in TRL"
    )
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = Field(
        "grpo", description="how token losses are averaged; cispo = as dapo, of clipped, detached ratio x logprob"
    )
    importance_level: Literal["token", "sequence"] = Field("token", description="ratio per token or sequence (GSPO)")
    correction: Literal["none", "truncated", "decoupled", "icepop", "sequence_mask"] = Field(
        "none",
        description="off-policy correction: the weight π_prox/μ capped (truncated), 0 above the cap (decoupled) or "
        "outside the band (icepop); or rows dropped whose mean ratio leaves the band (sequence_mask)",
    )
    correction_cap: Positive = Field(2.0, description="truncated, decoupled: cap of the correction's weight, > 0")
    correction_band: tuple[Positive, Positive] | None = Field(
        None, description="lowest and highest ratio kept; null = 0.5, 5 (icepop) or 0.99, 1.01 (sequence_mask)"
    )
    scale_rewards: bool = Field(True, description="divide advantages by the group's standard deviation")
    micro_batch_size: Count | None = Field(8, description="rows per forward/backward, >= 1; null = whole update")
    micro_batch_tokens: Count | None = Field(
        None, description="instead: tokens per forward/backward, padding included, of rows sorted by length, >= 1"
    )
    num_minibatches: Count = Field(1, description="updates per batch, >= 1, each on a slice of whole groups; divides P")
    num_iterations: Count = Field(1, description="passes over each batch, >= 1")
    max_grad_norm: Positive = Field(1.0, description="gradient norm is clipped to this, > 0")
    weight_decay: NonNegative = Field(0.0, description="AdamW's weight decay, >= 0; norms and biases have none")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("micro_batch_tokens") is not None:
            data = {"micro_batch_size": None, **data}
        if isinstance(data, dict) and data.get("model_name", TINY) == TINY:
            return {**TINY_DEFAULTS, **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> "GRPOConfig":
        if self.num_prompts_per_step % self.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.num_minibatches} must divide num_prompts_per_step="
                f"{self.num_prompts_per_step}, so that each update takes whole groups"
            )
        if self.clip_eps is None and self.clip_eps_high is not None:
            raise ValueError(f"clip_eps=null means no clip, but clip_eps_high={self.clip_eps_high}: set it null, too")
        if self.loss_type == "cispo" and self.dual_clip is not None:
            raise ValueError(f"dual_clip={self.dual_clip} cannot be combined with loss_type=cispo; set it to null")
        if self.correction_band is not None and self.correction_band[0] >= self.correction_band[1]:
            raise ValueError(f"correction_band={list(self.correction_band)}: the first must be below the second")
        if self.micro_batch_tokens is not None and self.micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_tokens={self.micro_batch_tokens} and micro_batch_size={self.micro_batch_size}: both "
                "divide an update; set one of them to null"
            )
        return self

    @property
    def trust_region(self) -> tuple[float, float]:
        """Lowest and highest ratio that the clip leaves alone."""
        if self.clip_eps is None:
            return 0.0, math.inf
        return 1 - self.clip_eps, 1 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    @property
    def kept_ratios(self) -> tuple[float, float]:
        """The band of `correction`, outside of which tokens or rows are dropped."""
        return self.correction_band or ((0.5, 5.0) if self.correction == "icepop" else (0.99, 1.01))

    @property
    def generated_prompts(self) -> int:
        """Prompts that a batch is generated from, before groups are picked."""
        return math.ceil(self.num_prompts_per_step * self.oversample)

    @property
    def batch_rows(self) -> int:
        """B = P * G: completions per batch."""
        return self.num_prompts_per_step * self.group_size

    @property
    def update_rows(self) -> int:
        """Rows of one optimizer update."""
        return self.batch_rows // self.num_minibatches
