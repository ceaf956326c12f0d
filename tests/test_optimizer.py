"""What a weight on a batch does to AdamW: one parameter and numbers by hand, lone and steady; decay; master weights."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer

from overlaprl_ray.config import GRPOConfig, TinyConfig
from overlaprl_ray.models.tiny import tiny_config
from overlaprl_ray.workers.optimizer import MasterAdamW

TARGETS = ["update", "loss", "lr"]
LR = 0.01


def parameter_of(optimizer: MasterAdamW) -> torch.Tensor:
    (parameter,) = optimizer.masters
    return parameter


def one_parameter(dtype: torch.dtype = torch.float32, **grpo: Any) -> MasterAdamW:
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.zeros_(model.weight)
    return MasterAdamW(model, GRPOConfig(**grpo))


def moments(optimizer: MasterAdamW) -> tuple[float, float]:
    state = optimizer.adamw.state[parameter_of(optimizer)]
    return state["exp_avg"].item(), state["exp_avg_sq"].item()


def take(optimizer: MasterAdamW, gradient: float, weight: float, apply_to: Any, max_norm: float = math.inf) -> None:
    """One update as the learner makes it."""
    optimizer.zero_grad()
    parameter_of(optimizer).grad = torch.full((1, 1), gradient)
    optimizer.clip(max_norm)
    optimizer.step(LR, weight, apply_to)


# ------------------------------------------------------------------------------------------------------------- by hand

# Gradients 2, 2, 2 with AdamW's default betas; first moment, second moment, distance in units of the rate, each after
# three updates. Plain: m = 2 (1 - .9³) = .542, v = 4 (1 - .999³) = .011988004, and each update moves by m̂/√v̂ = 1.
# A weight .1 on the second update:
#   update: m = .2, .9 · .2 + .1 · .2 = .2, .9 · .2 + .2 = .38; the second moment is the plain one, so √v̂ is 2 and the
#           parameter moves by .2/.1/2 + .2/.19/2 + .38/.271/2 = 1 + .5263158 + .7011070
#   loss:   m the same; v = .004, .004036, .008031964 → √v̂ = 2, 1.420926, 1.637048;
#           .2/.1/2 + .2/.19/1.420926 + .38/.271/1.637048 = 1 + .7408069 + .8565507
#   lr:     moments are the plain ones; 1 + .1 + 1
# A weight .1 on all three:
#   update: m a tenth, v the plain one, a tenth of the way
#   loss:   m a tenth, v a hundredth: the whole way, since the weight cancels
#   lr:     plain moments, a tenth of the way
V = 0.011988004
BY_HAND = {
    ("lone", "update"): (0.38, V, 2.2274228),
    ("lone", "loss"): (0.38, 0.008031964, 2.5973576),
    ("lone", "lr"): (0.542, V, 2.1),
    ("steady", "update"): (0.0542, V, 0.3),
    ("steady", "loss"): (0.0542, V / 100, 3.0),
    ("steady", "lr"): (0.542, V, 0.3),
}


@pytest.mark.parametrize("clipping", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize(("case", "apply_to"), list(BY_HAND))
def test_three_updates_by_hand(case: str, apply_to: str, clipping: bool) -> None:
    """Clipped to half its norm, the gradient is half as large: the moments shrink with it, the way does not."""
    optimizer = one_parameter()
    for weight in {"lone": (1.0, 0.1, 1.0), "steady": (0.1, 0.1, 0.1)}[case]:
        take(optimizer, 2.0, weight, apply_to, max_norm=1.0 if clipping else 10.0)
    first, second, distance = BY_HAND[case, apply_to]
    size = 0.5 if clipping else 1.0
    assert moments(optimizer) == pytest.approx((size * first, size**2 * second), rel=1e-5)
    assert -parameter_of(optimizer).item() == pytest.approx(LR * distance, rel=1e-5)


def test_decay_follows_the_rate_and_a_weight_on_the_update() -> None:
    """A lone parameter at 1 with gradient 0 and decay .5: times 1 - .01 · .5, or 1 - .001 · .5 where w = .1 counts."""
    for apply_to, left in {"update": 0.9995, "loss": 0.995, "lr": 0.9995}.items():
        optimizer = one_parameter(weight_decay=0.5)
        torch.nn.init.ones_(parameter_of(optimizer))
        take(optimizer, 0.0, 0.1, apply_to)
        assert parameter_of(optimizer).item() == pytest.approx(left, rel=1e-6)


# ------------------------------------------------------------------------------------------- influence, lone and steady


def influence(weight: float, apply_to: str) -> float:
    """How far one batch's gradient moves a parameter in the end, in units of the rate.

    The other batches pull with ±1 in turn, so the second moment is 1 and the first hovers about 0. The difference
    between two runs with and without that batch's gradient isolates what it did, at once and through momentum later.
    """
    ends = []
    for gradient in (1.0, 0.0):
        optimizer = one_parameter()
        parameter = parameter_of(optimizer)
        optimizer.adamw.state[parameter] = {
            "step": torch.tensor(1e6),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.ones_like(parameter),
        }
        for step in range(200):
            judged = step == 20
            take(optimizer, gradient if judged else (-1.0) ** step, weight if judged else 1.0, apply_to)
        ends.append(parameter.item())
    return (ends[1] - ends[0]) / LR


def test_what_a_lone_weight_leaves_of_a_batch() -> None:
    """A gradient g of one batch moves the parameter by lr·g·Σ_k 0.1·0.9^k = lr·g in all, 0.1 of it at its own step.

    w = 0.1 on the update or the loss: 0.1 of that. w = 0.1 on the learning rate of its own step: 0.1·0.1 + the 0.9
    which momentum delivers in later steps = 0.91.
    """
    for apply_to, left in {"update": 0.1, "loss": 0.1, "lr": 0.91}.items():
        assert influence(1.0, apply_to) == pytest.approx(1.0, abs=0.01)
        assert influence(0.1, apply_to) == pytest.approx(left, abs=0.01), apply_to


@pytest.mark.parametrize(("apply_to", "left"), [("update", 0.1), ("loss", 1.0), ("lr", 0.1)])
def test_what_a_steady_weight_leaves_of_the_way(apply_to: str, left: float) -> None:
    ends = []
    for weight in (1.0, 0.1):
        optimizer = one_parameter(adam_eps=1e-12)
        for step in range(50):
            take(optimizer, math.sin(step + 1) + 0.3, weight, apply_to)
        ends.append(parameter_of(optimizer).item())
    assert ends[1] / ends[0] == pytest.approx(left, rel=1e-4)


# --------------------------------------------------------------------------------------------- plain AdamW, and masters


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(TinyConfig()))


def gpt2() -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16))


@pytest.mark.parametrize("apply_to", TARGETS)
def test_without_a_weight_it_is_plain_adamw_to_the_bit(apply_to: Any) -> None:
    """A rule that never fires must not change a run; betas, epsilon and decay are those of the configuration."""
    shape = {"adam_beta1": 0.8, "adam_beta2": 0.98, "adam_eps": 1e-6, "weight_decay": 0.1}
    ours, plain = tiny(), tiny()
    optimizer = MasterAdamW(ours, GRPOConfig(**shape))
    decays = Trainer.get_decay_parameter_names(None, plain)
    groups = [
        {"params": [p for n, p in plain.named_parameters() if (n in decays) == decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.98), eps=1e-6, fused=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for left, right in zip(ours.parameters(), plain.parameters(), strict=True):
            left.grad = torch.randn(left.shape, generator=generator)
            right.grad = left.grad.clone()
        for group in adamw.param_groups:
            group["lr"] = LR / (step + 1)
        optimizer.step(LR / (step + 1), 1.0, apply_to)
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("build", [tiny, gpt2])
def test_norms_and_biases_do_not_decay_as_in_hugging_faces_trainer(build: Any) -> None:
    model = build()
    optimizer = MasterAdamW(model, GRPOConfig(weight_decay=0.1))
    decayed = {id(p) for group in optimizer.adamw.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == set(
        Trainer.get_decay_parameter_names(None, model)
    ) & dict(model.named_parameters()).keys()
    assert any("norm" in name or "bias" in name for name, p in model.named_parameters() if id(p) not in decayed)
    assert sum(len(group["params"]) for group in optimizer.adamw.param_groups) == len(list(model.parameters()))


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16; the masters must see 257."""
    optimizer = one_parameter(torch.bfloat16)
    for gradient in (256.0, 1.0):
        optimizer.parameters[0].grad = torch.tensor([[gradient]], dtype=torch.bfloat16)
        optimizer.collect()
    assert parameter_of(optimizer).grad.item() == 257.0
    assert optimizer.clip(1.0) == pytest.approx(257.0)
