"""Every setting of a run, with its default, its unit and its limits. The algorithm's are in grpo.py.

`ExperimentConfig()` is the built-in default (a tiny model, arithmetic, no download). Unknown keys fail.

    from overlaprl_ray import ExperimentConfig, GRPOConfig, train
    train(ExperimentConfig(grpo=GRPOConfig(num_steps=20), seed=1))
"""

import datetime as dt
import json
from typing import Any

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from overlaprl_ray.config.grpo import TINY, Count, Group, GRPOConfig, Positive, Seed, Share, Weight, Whole
from overlaprl_ray.config.model import ModelConfig
from overlaprl_ray.config.pipeline import PipelineConfig
from overlaprl_ray.config.staleness import StalenessConfig


class TaskConfig(Group):
    """What is asked, and what counts as right."""

    name: str = Field("arithmetic", description="where problems come from: arithmetic, gsm8k, records, gym:<dataset>")
    path: str | None = Field(None, description="gsm8k: folder with train.jsonl and test.jsonl (null = the hub); "
                             "records: a jsonl/json/parquet/csv file, a folder of them, or a hub name")  # fmt: skip
    eval_path: str | None = Field(None, description="records: file of held-out problems; null = split off `path`")
    eval_size: Count = Field(256, description="held-out problems, >= 1")
    rewards: list[str] = Field([], description="reward functions, by name or package.module:function; [] = the "
                               "task's own. The first one decides accuracy")  # fmt: skip
    reward_weights: list[Weight] | None = Field(None, description="one weight per reward; null = all 1")
    reward_timeout_s: Positive = Field(60.0, description="longest time for scoring one batch, seconds, > 0; then "
                                     "the process ends, and the run")  # fmt: skip
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text that rewards read; "
                                      "false: all but the EOS that ends it stay")  # fmt: skip
    system_prompt: str | None = Field(None, description="system message, for models with a chat template")
    max_prompt_tokens: Count | None = Field(None, description="problems of more tokens are left out, >= 1; null = none")
    date: dt.date | None = Field(None, description="day that chat templates see, as 2026-12-01; null = the first")
    prompt_template: str | None = Field(None, description="str.format over a problem's columns, e.g. '{question}'")
    question_column: str = Field("question", description="records: column of the question, a text or role/content "
                                 "turns; a.b = column b inside a")  # fmt: skip
    answer_column: str = Field("answer", description="records: column of the answer, or its dotted path")
    digits: int = Field(2, ge=1, le=4, description="arithmetic: digits of each summand, 1 to 4")
    reverse_answer: bool = Field(True, description="arithmetic: least significant digit first, as small models like")
    gym: dict[str, Any] = Field({}, description="gym: the dataset's parameters, e.g. {max_terms: 2}; size (1 to 10^6, "
                                "problems drawn, 2000) and seed (0 to 10^6, 0) among them")  # fmt: skip

    @field_validator("rewards", mode="before")
    @classmethod
    def _named(cls, rewards: Any) -> Any:
        """Actors import rewards: a function itself, the obvious thing to give in a notebook, is of no use to them."""
        for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
            if callable(reward):
                name = getattr(reward, "__name__", "reward").strip("<>")
                raise PydanticCustomError(
                    "reward_name",
                    "actors import rewards by name; put {name} into a module, in a notebook by a cell that begins with "
                    "%%writefile my_rewards.py, and give ['my_rewards:{name}']",
                    {"name": name},
                )
        return rewards

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        tasks = ("arithmetic", "gsm8k", "records")
        if name not in tasks and not name.startswith("gym:"):
            near = ", ".join(map(repr, tasks))
            raise PydanticCustomError("task_name", "input should be {near} or 'gym:<dataset>'", {"near": near})
        return name

    @field_validator("gym")
    @classmethod
    def _plain(cls, gym: dict[str, Any]) -> dict[str, Any]:
        """config.yaml and a trial's name are made of it: what JSON cannot say would not come back as it was."""
        try:
            if json.loads(json.dumps(gym, allow_nan=False)) == gym:
                return gym
        except (TypeError, ValueError):
            pass
        raise PydanticCustomError("gym_values", "input should be names with numbers, texts, true, false, null or lists")

    @model_validator(mode="after")
    def _check(self) -> "TaskConfig":
        if self.reward_weights is not None and len(self.reward_weights) != max(1, len(self.rewards)):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {max(1, len(self.rewards))} rewards; "
                "give one weight per reward"
            )
        return self


class ResourcesConfig(Group):
    """What each actor gets. GPU shares are of one device; null = none without a GPU, a share that fits with one."""

    threads: int = Field(1, ge=1, le=1024, description="CPU threads per actor, 1 to 1024; bits depend on it")
    num_generators: int = Field(1, ge=1, le=64, description="generators, 1 to 64; each takes whole groups of a batch")
    generator_gpu: Share | None = Field(None, description="GPU share of each generator, 0 to 1")
    reference_gpu: Share | None = Field(None, description="GPU share of the reference, 0 to 1")
    learner_gpu: Share | None = Field(None, description="GPU share of the learner, 0 to 1")
    start_timeout_s: Positive = Field(600.0, description="longest wait for the actors to be ready, seconds, > 0")


class OutputConfig(Group):
    """What is written, and where."""

    dir: str | None = Field(
        None, pattern=r"^[^\x00]+$", description="this run's folder; null = runs/<time>-<model>-<mode>-s<seed>"
    )
    eval_every: Whole = Field(50, description="steps between held-out evaluations; 0 = first and last only")
    checkpoint_every: Whole = Field(50, description="steps between checkpoints to resume from; 0 = none")
    keep_checkpoints: Count = Field(2, description="newest checkpoints kept, >= 1, besides the best by accuracy")
    completions_every: Whole = Field(10, description="steps between samples in completions.jsonl; 0 = none")
    save_final: bool = Field(True, description="save the trained model (or LoRA adapter) and tokenizer to final/")
    merge_lora: bool = Field(False, description="save base + LoRA adapter as one model, too, to final/merged/")
    tensorboard: bool = Field(True, description="write TensorBoard events into the run's folder")
    wandb: str | None = Field(None, description="Weights & Biases project to log to (extra `wandb`); null = none")
    actor_logs: bool = Field(False, description="show what actors print, each line with its actor's name before it")


class ExperimentConfig(Group):
    """One run, whole. The same config and seed give the same run."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    pipeline: PipelineConfig = PipelineConfig()
    staleness: StalenessConfig = StalenessConfig()
    resources: ResourcesConfig = ResourcesConfig()
    output: OutputConfig = OutputConfig()
    seed: Seed = Field(0, description="seed of everything random in the run, 0 to 2^31 - 1")

    @model_validator(mode="after")
    def _check(self) -> "ExperimentConfig":
        micro, group, update = self.grpo.micro_batch_size, self.grpo.group_size, self.grpo.update_rows
        if self.judges_groups and micro and micro % group and micro < update:
            raise ValueError(
                f"staleness.granularity=group needs whole groups per micro-batch: grpo.micro_batch_size={micro} "
                f"must be a multiple of grpo.group_size={group}"
            )
        if self.grpo.num_prompts_per_step < self.resources.num_generators:
            raise ValueError(
                f"resources.num_generators={self.resources.num_generators} exceeds grpo.num_prompts_per_step="
                f"{self.grpo.num_prompts_per_step}: a generator would have no group to make"
            )
        if self.late_lag and self.pipeline.schedule != "exact":
            raise ValueError(
                f"pipeline.late_share={self.pipeline.late_share} cannot be combined with pipeline.schedule="
                f"{self.pipeline.schedule}: late batches are part of the exact schedule; use exact"
            )
        if self.late_lag and self.output.checkpoint_every:
            raise ValueError(
                f"output.checkpoint_every={self.output.checkpoint_every} cannot be combined with pipeline.late_share="
                f"{self.pipeline.late_share}: no checkpoint holds weights so old; set it to 0"
            )
        if self.pipeline.generation == "stream":
            self._check_stream()
        if self.output.merge_lora and not (self.model.lora_r and self.output.save_final):
            raise ValueError(
                f"output.merge_lora=true with model.lora_r={self.model.lora_r} and output.save_final="
                f"{str(self.output.save_final).lower()}: there is nothing to merge; set it to false"
            )
        if self.model.lora_r and self.model.engine == "vllm":
            raise ValueError(
                f"model.lora_r={self.model.lora_r} goes only with model.engine=hf, not {self.model.engine}; use hf, "
                "or model.lora_r=0"
            )
        tiny = self.model.tiny
        if self.model.engine == "vllm" and self.grpo.model_name == TINY and tiny.hidden // tiny.heads % 32:
            raise ValueError(
                f"model.engine=vllm wants heads of 32, 64, 96 or more: model.tiny.hidden={tiny.hidden} by heads="
                f"{tiny.heads} makes {tiny.hidden // tiny.heads}; try heads=2 and hidden=64"
            )
        return self

    def _check_stream(self) -> None:
        slots, group = self.pipeline.slots, self.grpo.group_size
        for name, value, wrong, right in (
            ("model.engine", self.model.engine, self.model.engine == "vllm", "hf"),
            ("resources.num_generators", self.resources.num_generators, self.resources.num_generators > 1, 1),
            ("grpo.oversample", self.grpo.oversample, self.grpo.oversample > 1, 1),
            ("pipeline.late_share", self.pipeline.late_share, self.late_lag > 0, 0),
        ):
            if wrong:
                raise ValueError(f"{name}={value} cannot be combined with pipeline.generation=stream; use {right}")
        every, refresh = self.output.checkpoint_every, self.pipeline.refresh_every
        if every and (not refresh or every % refresh):
            raise ValueError(
                f"output.checkpoint_every={every} must be a multiple of pipeline.refresh_every={refresh}: a checkpoint "
                "can hold rows that run only where their caches are computed anew; change one of them"
            )
        if slots is not None and slots < group:
            raise ValueError(f"pipeline.slots={slots} holds no group of grpo.group_size={group}; raise it to that")

    @property
    def lag(self) -> int:
        """Batches generated ahead, as the mode has it: `sync` never does."""
        return 0 if self.pipeline.mode == "sync" else self.pipeline.lag

    @property
    def late_lag(self) -> int:
        """How much older than its lag says the weights of a batch can be, steps; 0 where no batch is late."""
        return self.pipeline.late_lag if self.pipeline.late_share and self.pipeline.mode != "sync" else 0

    @property
    def rule(self) -> str:
        """The staleness rule, as the mode has it: only `staleness` and `overlap` judge."""
        return self.staleness.rule if self.pipeline.mode in ("staleness", "overlap") else "none"

    @property
    def judges_groups(self) -> bool:
        """Whether the staleness rule must see the rows of a group together, so in one micro-batch."""
        return self.rule == "kl" and self.staleness.granularity == "group"

    @property
    def learner_scores(self) -> bool:
        """Whether the learner, its adapter off, is the reference too: elsewhere than in `overlap`, for its own base."""
        own_base = self.model.lora_r > 0 and self.model.reference is None
        return self.grpo.beta > 0 and own_base and self.pipeline.mode != "overlap"

    @property
    def needs_reference(self) -> bool:
        """Whether there is a reference actor, with a model of its own."""
        return self.grpo.beta > 0 and not self.learner_scores
