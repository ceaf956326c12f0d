"""What a run's numbers depend on besides its settings: problems, code of rewards, tokenizer, chat template, the day.

Their hashes lie in inputs.yaml beside config.yaml. A run is not continued with others, which would mix old and new.

config = dated(config, folder)
check_inputs_kept(folder, task_inputs(config, task))    # ConfigError naming what changed
changed_inputs(folder, task_inputs(config, task))    # ["problems"], where a sweep's finished trial had other ones
"""

import hashlib
import re
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from overlaprl_ray.config import ExperimentConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runs.files import replace_text, writing
from overlaprl_ray.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "inputs.yaml"
DAY = "task.date"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in a column, another one in every process


def dated(config: ExperimentConfig, folder: Path | None = None) -> ExperimentConfig:
    """With the day that chat templates see: as set, else that of the run in the folder, else today."""
    saved = _saved(folder).get(DAY) if folder else None
    day = date.fromisoformat(saved) if saved else date.today()
    return config.with_setting(DAY, config.task.date or day)


def task_inputs(config: ExperimentConfig, task: Task) -> dict[str, str]:
    """Hashes of the problems, and of each module that a reward of the user's own comes from; the day."""
    problems = hashlib.sha256(f"{len(task.train)}".encode())
    for problem in (*task.train, *task.heldout):
        text = ADDRESS.sub("", repr((problem.prompt, problem.answer, dict(problem.columns))))
        problems.update(text.encode("utf-8", "backslashreplace"))
    modules = {name.partition(":")[0] for name in task.rewards if ":" in name}
    files = {module: getattr(sys.modules.get(module), "__file__", None) for module in sorted(modules)}
    code = {f"code of {module}": _hash(Path(file).read_bytes()) for module, file in files.items() if file}
    return {DAY: str(config.task.date), "problems": problems.hexdigest()[:16], **code}


def tokenizer_inputs(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Hashes of what turns a problem into tokens."""
    from transformers import PreTrainedTokenizerFast

    held = tokenizer.backend_tokenizer.to_str() if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    text = held or repr(sorted(tokenizer.get_vocab().items()))
    return {"tokenizer": _hash(text.encode()), "chat template": _hash(repr(tokenizer.chat_template).encode())}


def changed_inputs(folder: Path, inputs: Mapping[str, str]) -> list[str]:
    """What is not as it was when the run in the folder began; nothing for a run of a version that kept no record."""
    saved = _saved(folder)
    return [name for name, value in inputs.items() if saved.get(name, value) != value]


def check_inputs_kept(folder: Path, inputs: Mapping[str, str]) -> None:
    """Refuse to continue the run in the folder with other inputs."""
    if changed := changed_inputs(folder, inputs):
        raise ConfigError(
            f"output.dir = '{folder}': the run there began with other inputs ({', '.join(changed)}); restore them, or "
            "start a new run in a new folder"
        )


def keep_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Write them into a run's folder."""
    with writing(folder):
        replace_text(folder / FILE, yaml.safe_dump(dict(inputs), sort_keys=False))


def _saved(folder: Path) -> dict[str, str]:
    try:
        return dict(yaml.safe_load((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
