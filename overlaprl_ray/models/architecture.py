"""What a model's configuration alone tells: architectures that would be computed wrongly, or not at all.

check_kind(model_config, "some/model", "grpo.model_name")
check_logits(model_config, "some/model", "grpo.model_name")
check_cache(model_config, "some/model")    # only where the Hugging Face engine generates
"""

import inspect
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, DynamicCache
from transformers.cache_utils import DynamicLayer

from overlaprl_ray.errors import ConfigError

CACHE_NAMES = {"past_key_values", "cache"}  # of a forward's argument; the second is that of newer releases
# What models call a cap or factor put on logits around the output head; the learner measures it besides (logprobs.py).
LOGIT_CHANGES = (
    "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap",
    "logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier",
)  # fmt: skip


def check_kind(architecture: Any, name: str, field: str) -> None:
    """Refuse what is not a plain language model with weights that can be trained. Raises `ConfigError`."""
    kind, quantised = architecture.model_type, getattr(architecture, "quantization_config", None)
    if type(architecture) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        fault = f"a {kind} is no causal language model; give one"
    elif architecture.is_encoder_decoder or type(architecture) in MODEL_FOR_MASKED_LM_MAPPING:
        fault = f"a {kind} has an encoder, whose tokens see those to come; give a decoder-only model"
    elif getattr(architecture, "vocab_size", None) is None:  # it is that of one of its parts
        fault = f"a {kind} has parts beside its language model; give a model of text alone"
    elif quantised is not None:
        method = quantised["quant_method"] if isinstance(quantised, dict) else quantised.quant_method
        fault = (
            f"its weights are quantised ({method}) and cannot be trained; give the original ones, and to save memory "
            "set model.dtype to bfloat16 or model.lora_r"
        )
    else:
        return
    raise ConfigError(f"{field} = '{name}': {fault}")


def check_logits(architecture: Any, name: str, field: str) -> None:
    """Refuse a model whose logits are not its output head's alone: logprobs would be of another distribution."""
    text = architecture.get_text_config()
    for change in LOGIT_CHANGES:
        value = getattr(text, change, None)
        if value not in (None, 1):
            raise ConfigError(
                f"{field} = '{name}': a {architecture.model_type} with {change} = {value} changes its logits after the "
                "output head, which is unsupported; give a model that does not"
            )


def check_cache(architecture: Any, name: str) -> None:
    """Refuse a model whose cache cannot be narrowed to some of its rows, as the decode loop does all the time.

    Keys and values can, with a sliding window too; states of linear attention, convolutions and state spaces cannot.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)]  # importing it registers its own kinds of layer
    if not CACHE_NAMES & inspect.signature(model_class.forward).parameters.keys():  # it would pass the cache by
        raise _uncached(architecture, name, f"{model_class.__name__} takes none")
    try:
        kept = [type(layer) for layer in DynamicCache(config=architecture).layers if not _selects_rows(type(layer))]
    except Exception as error:  # a configuration that the cache does not know how to read: no common type
        raise _uncached(architecture, name, f"none can be made, {type(error).__name__}: {error}") from error
    if kept:
        raise _uncached(architecture, name, f"its {kept[0].__name__} keeps more than keys and values")


def check_joinable(architecture: Any, name: str) -> None:
    """Refuse a model whose cache has layers of other lengths than the text: a stream joins rows column by column."""
    kinds = {type(layer) for layer in DynamicCache(config=architecture).layers}
    if others := sorted(kind.__name__ for kind in kinds - {DynamicLayer}):
        raise ConfigError(
            f"grpo.model_name = '{name}': cache rows of a {architecture.model_type} cannot be joined ({others[0]}), as "
            "pipeline.generation = 'stream' has to; use batch, or a model with full attention in every layer"
        )


def _uncached(architecture: Any, name: str, fault: str) -> ConfigError:
    return ConfigError(
        f"grpo.model_name = '{name}': rows of a {architecture.model_type} cannot be dropped from its cache ({fault}), "
        "as model.engine = 'hf' has to; give a model with attention in every layer"
    )


def _selects_rows(layer: type) -> bool:
    """Whether a kind of layer selects all that it holds: where it reorders by itself, it must select by itself."""
    names = [vars(kind).keys() for kind in layer.__mro__]
    selects = next((i for i, name in enumerate(names) if "batch_select_indices" in name), None)
    reorders = next((i for i, name in enumerate(names) if "reorder_cache" in name), len(names))
    return selects is not None and selects <= reorders
