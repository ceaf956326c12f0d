"""The built-in model: a small Llama over a character tokenizer, warm-started by supervised training.

The default one is part of the package (`builtin/`, made by scripts/make_builtin_model.py): the same start on every
machine, nothing to wait for. Other shapes, digits and tasks are warm-started on the spot into an ordinary Hugging Face
folder in the cache (`$OVERLAPRL_CACHE`, default ~/.cache/overlaprl_ray), keyed by everything its bits depend on.

    folder = tiny_folder(config.model.tiny, task.train, config.resources.threads)
    AutoModelForCausalLM.from_pretrained(folder)
"""

import hashlib
import json
import shutil
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from overlaprl_ray.config import TinyConfig
from overlaprl_ray.errors import RunError
from overlaprl_ray.models.files import BUILTIN, CONTEXT, cache_folder, is_packaged
from overlaprl_ray.rollout import pad_left, position_ids
from overlaprl_ray.tasks import Problem

RECIPE = 1  # raise it when the warm start below changes, so that no stale cache is used
SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; anything that is not printable ASCII is `<unk>`."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(config: TinyConfig) -> LlamaConfig:
    """The architecture as transformers names it."""
    tokenizer = tiny_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=4 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def tiny_folder(config: TinyConfig, problems: Sequence[Problem], threads: int = 1) -> Path:
    """The folder of the model to start from: the packaged one where it fits, else a warm-started one from the cache.

    The packaged one fits its own shape, and training problems that include all it has seen: then it knows no held-out
    one. `threads`: with how many to warm-start, since the bits depend on it.
    """
    if is_packaged(config, problems):
        return BUILTIN
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _warm_started(config, problems)
    except OSError as error:
        raise RunError(
            f"OVERLAPRL_CACHE: '{error.filename or cache_folder()}' cannot be written ({error.strerror or error}); "
            "free some space, or give another folder"
        ) from error
    finally:
        torch.set_num_threads(before)


def _warm_started(config: TinyConfig, problems: Sequence[Problem]) -> Path:
    """The cached folder, made if it is not there. Safe to call from several processes at once."""
    key = hashlib.sha256()
    bits = [
        config.model_dump(),
        RECIPE,
        torch.__version__,
        transformers.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
    ]
    key.update(json.dumps(bits, sort_keys=True).encode())
    for problem in problems:
        key.update(f"{problem.prompt}\0{problem.answer}\0".encode())
    folder = cache_folder() / f"tiny-{key.hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            scratch = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
            try:
                save_tiny(config, problems, scratch)
                scratch.rename(folder)  # all of it or nothing
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def save_tiny(config: TinyConfig, problems: Sequence[Problem], folder: Path) -> None:
    """Warm-start a model on these problems and save it with its tokenizer."""
    disable_progress_bar()  # for half a megabyte
    warm_start(config, problems).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def warm_start(config: TinyConfig, problems: Sequence[Problem]) -> LlamaForCausalLM:
    """Train a fresh model by cross-entropy on (prompt, answer) pairs until it is right now and then.

    It stops at `warm_start_reward`, the chance of sampling the exact answer, rather than after a number of steps:
    skill arrives suddenly, and elsewhere's rounding would meet that moment at another step.
    """
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(tiny_config(config))
    encoded = [
        (tokenizer(p.prompt)["input_ids"], [*tokenizer(p.answer)["input_ids"], tokenizer.eos_token_id])
        for p in problems
    ]
    encoded = [pair for pair in encoded if len(pair[0]) + len(pair[1]) <= CONTEXT]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_lr, weight_decay=0.0, fused=True)
    rng = np.random.default_rng(config.seed)
    for step in range(config.warm_start_max_steps):
        chosen = [encoded[i] for i in rng.integers(len(encoded), size=config.warm_start_batch)]
        answer_logprob = _answer_logprobs(model, chosen, tokenizer.pad_token_id)
        # the chance before this update, over fresh problems: no separate measurement is needed
        if config.warm_start_reward <= answer_logprob.detach().sum(1).exp().mean().item():
            break
        for group in optimizer.param_groups:
            group["lr"] = config.warm_start_lr * min(1.0, (step + 1) / 20)
        loss = -answer_logprob.sum() / (answer_logprob != 0).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def _answer_logprobs(model: LlamaForCausalLM, pairs: Sequence[tuple[list[int], list[int]]], pad: int) -> Tensor:
    """(B, L) logprobs of the answers' tokens, 0 elsewhere."""
    ids, mask = pad_left([prompt + answer for prompt, answer in pairs], pad)
    is_answer = torch.stack([torch.arange(ids.shape[1]) >= ids.shape[1] - len(answer) for _, answer in pairs])
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.where(is_answer[:, 1:], logprobs, 0.0)
