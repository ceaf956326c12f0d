"""How models are held, and the shape of the built-in one."""

from typing import Literal

from pydantic import Field, model_validator

from overlaprl_ray.config.grpo import Count, Group, Seed, Whole


class TinyConfig(Group):
    """The built-in model: a small Llama over a character tokenizer, warm-started by supervised training."""

    layers: int = Field(2, ge=1, le=64, description="transformer layers, 1 to 64")
    hidden: int = Field(64, ge=8, le=4096, multiple_of=8, description="hidden size, a multiple of 8 up to 4096")
    heads: Count = Field(4, description="attention heads, >= 1; divides hidden")
    warm_start_reward: float = Field(0.25, ge=0, le=1, description="the warm start ends at this mean reward, 0 to 1")
    warm_start_max_steps: Whole = Field(1500, description="supervised steps at most, >= 0")
    warm_start_lr: float = Field(2e-3, gt=0, le=1, description="learning rate of the warm start, > 0 and at most 1")
    warm_start_batch: Count = Field(128, description="problems per supervised step, >= 1")
    seed: Seed = Field(0, description="seed of initial weights and warm start (not the run's), 0 to 2^31 - 1")

    @model_validator(mode="after")
    def _check(self) -> "TinyConfig":
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads={self.heads} must divide hidden={self.hidden} into even parts; try 4 and 64")
        return self


class ModelConfig(Group):
    """How models are held."""

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="weights and compute; with bfloat16 the optimizer keeps float32 master weights"
    )
    reference: str | None = Field(None, description="reference model; null = the initial policy")
    engine: Literal["auto", "hf", "vllm"] = Field(
        "auto", description="what generates; vllm needs the extra `vllm`; auto: vllm where it is installed and the "
        "generator has a share of a GPU, else hf")  # fmt: skip
    gradient_checkpointing: bool = Field(False, description="recompute layers in backward: less memory, more time")
    lora_r: int = Field(0, ge=0, le=4096, description="rank of LoRA adapters (extra `lora`), 0 to 4096; 0 = train all")
    lora_alpha: Count | None = Field(None, description="adapters are scaled by lora_alpha / lora_r, >= 1; null = 2 r")
    lora_target: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="layers with an adapter: all linear ones but the output head, or a list of names"
    )
    tiny: TinyConfig = Field(TinyConfig(), description="the built-in model's shape")
