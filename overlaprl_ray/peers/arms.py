"""What is compared: the arms, the process each one is told about, and the trace that each one leaves.

arms = choose_arms(config, ["overlap", "sync", "trl"], trl_threads=[1, 2], trl_bf16=["autocast"])
[arm.label for arm in arms]     # ["overlap", "sync (2 threads)", "TRL (1 thread)", "TRL (2 threads)"]
"""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, GenerationConfig

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.models.loading import load_tokenizer

Bf16 = Literal["autocast", "weights"]
NEVER = "<never>"  # an end of text that no model can produce


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of the comparison. `mode` is ours; `bf16` is how TRL computes where the work is in bfloat16."""

    label: str
    kind: Literal["own", "trl"]
    threads: int
    mode: str = "overlap"
    bf16: Bf16 | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """What an arm's process is to do. `every`: steps between held-out evaluations (None: none are wanted).

    TRL stops before `config.grpo.num_steps` where an evaluation reaches `target`, or after `seconds` of training.
    """

    arm: Arm
    config: ExperimentConfig
    every: int | None = None
    target: float | None = None
    seconds: float | None = None

    def write(self, path: Path) -> None:
        """As JSON."""
        values = {**dataclasses.asdict(self), "config": self.config.model_dump(mode="json")}
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Job":
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        config = ExperimentConfig.model_validate(values.pop("config"))
        return cls(Arm(**values.pop("arm")), config, **values)


@dataclasses.dataclass(frozen=True)
class Track:
    """What an arm did: per step the second at which it ended (0 = the first batch's generation begins; evaluations
    left out), completion tokens and mean reward; (step, accuracy) of evaluations."""

    ends: list[float]
    tokens: list[int]
    rewards: list[float]
    evaluations: list[tuple[int, float]]

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Track":
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "evaluations": [(int(s), float(a)) for s, a in values["evaluations"]]})

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(seconds until the weights existed, their accuracy)."""
        return [(self.ends[step - 1] if step else 0.0, accuracy) for step, accuracy in self.evaluations]

    def seconds_to(self, target: float) -> float | None:
        """Seconds until weights existed that reach an accuracy; None if none did."""
        return next((seconds for seconds, accuracy in self.curve if accuracy >= target), None)


def choose_arms(
    config: ExperimentConfig, wanted: Sequence[str], trl_threads: Sequence[int], trl_bf16: Sequence[Bf16]
) -> list[Arm]:
    """The arms in the order in which they run. Raises `ConfigError` where TRL is wanted and not installed.

    Of ours `sync` has all of the budget's threads, for one of its actors computes at a time; the others have
    `resources.threads` for each actor.
    """
    arms: list[Arm] = []
    for name in dict.fromkeys(wanted):
        if name == "sync":
            threads = max([*trl_threads, config.resources.threads])
            arms.append(Arm(f"sync ({_threads(threads)})", "own", threads, name))
        elif name != "trl":
            arms.append(Arm(name, "own", config.resources.threads, name))
        else:
            if importlib.util.find_spec("trl") is None:
                raise ConfigError("--arms trl: TRL is not installed; pip install 'overlaprl_ray[bench]'")
            for how in trl_bf16 if config.model.dtype == "bfloat16" else [None]:
                extra = "" if how is None else f", bf16 {how}"
                arms += [Arm(f"TRL ({_threads(n)}{extra})", "trl", n, bf16=how) for n in sorted(set(trl_threads))]
    return arms


def config_of(arm: Arm, config: ExperimentConfig, seed: int) -> ExperimentConfig:
    """The work as this arm does it, with nothing written but what is measured."""
    groups: dict[str, Any] = {
        "pipeline": config.pipeline.model_copy(update={"mode": arm.mode}),
        "resources": config.resources.model_copy(update={"threads": arm.threads}),
        "output": config.output.model_copy(
            update={"checkpoint_every": 0, "completions_every": 0, "tensorboard": False, "save_final": False}
        ),
    }
    return config.model_copy(update={**groups, "seed": seed})


def never_ending(folder: str | Path, into: Path) -> Path:
    """A copy of a model's folder whose end of text has an id beyond the model's vocabulary: no text can end early.

    So every completion has `max_new_tokens`, whoever generates it. Weights are linked, not copied.
    """
    folder = Path(os.path.expanduser(folder)).absolute()
    into.mkdir(parents=True)
    for weights in folder.glob("*.safetensors*"):
        (into / weights.name).symlink_to(weights)
    tokenizer, config = load_tokenizer(str(folder)), AutoConfig.from_pretrained(folder)
    size = config.get_text_config().vocab_size
    tokenizer.add_tokens([f"<unused {i}>" for i in range(len(tokenizer), size)])
    tokenizer.add_special_tokens({"eos_token": NEVER})
    assert tokenizer.eos_token_id >= size
    tokenizer.save_pretrained(into)
    config.eos_token_id = None
    config.save_pretrained(into)
    GenerationConfig(pad_token_id=tokenizer.pad_token_id).save_pretrained(into)
    return into


def _threads(n: int) -> str:
    return f"{n} thread{'s' if n > 1 else ''}"
