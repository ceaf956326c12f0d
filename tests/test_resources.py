"""GPU shares: the defaults fit one GPU, and whatever is accepted can be placed. What only a GPU's size decides."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray._common.ray_option_utils import validate_actor_options

from overlaprl_ray.config import ExperimentConfig, ModelConfig
from overlaprl_ray.config.identity import config_hash, differences
from overlaprl_ray.engines.base import check_logprobs
from overlaprl_ray.engines.vllm import CPU_CACHE, cache_bytes
from overlaprl_ray.errors import ConfigError, RunError
from overlaprl_ray.runtime.resources import Plan, check_memory, plan_resources, resolve_engine, tensor_bytes
from overlaprl_ray.runtime.weights import publish, received, to_host


def config(beta: float = 0.04, **resources) -> ExperimentConfig:
    return ExperimentConfig(grpo={"beta": beta}, resources=resources)


def shares(plan: Plan) -> list[float]:
    return [plan.generator_gpu] * plan.num_generators + [plan.reference_gpu, plan.learner_gpu]


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("generators", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("gpus", [1.0, 2.0, 8.0])
def test_defaults_fit_one_gpu(generators: int, beta: float, gpus: float) -> None:
    plan = plan_resources(config(beta, num_generators=generators), gpus)
    assert 0.5 < sum(shares(plan)) <= 1
    assert plan.generator_gpu > 0
    assert plan.learner_gpu > 0
    assert (plan.reference_gpu > 0) == plan.needs_reference == (beta > 0)
    for share in shares(plan):
        validate_actor_options({"num_gpus": share}, False)  # Ray takes four decimals


@pytest.mark.parametrize("generators", [1, 3])
def test_without_a_gpu_nothing_is_asked_for(generators: int) -> None:
    plan = plan_resources(config(num_generators=generators), 0.0)
    assert shares(plan) == [0.0] * (generators + 2)


def test_without_a_reference_its_share_is_free() -> None:
    plan = plan_resources(config(0.0, generator_gpu=0.5, reference_gpu=0.9, learner_gpu=0.5), 1.0)
    assert shares(plan) == [0.5, 0.0, 0.5]
    with pytest.raises(ConfigError, match=r"reference_gpu = 0\.9"):
        plan_resources(config(0.04, generator_gpu=0.5, reference_gpu=0.9, learner_gpu=0.5), 1.0)


def test_what_is_given_is_kept() -> None:
    plan = plan_resources(config(generator_gpu=0.2, reference_gpu=0, learner_gpu=0.8), 1.0)
    assert shares(plan) == [0.2, 0.0, 0.8]
    assert shares(plan_resources(config(generator_gpu=1 / 3, reference_gpu=1e-9, learner_gpu=0), 1.0)) == [
        0.3333,
        0.0001,
        0.0,
    ]


@pytest.mark.parametrize(
    ("gpus", "resources", "said"),
    [
        (0.0, {"learner_gpu": 0.5}, ["learner_gpu = 0.5", "there are 0", "set them to 0 or null"]),
        (0.0, {"reference_gpu": 0.1}, ["reference_gpu = 0.1", "set them to 0 or null"]),
        (1.0, {"generator_gpu": 0.6, "learner_gpu": 0.6}, ["1.35 GPU in all", "there are 1", "lower the shares"]),
        (1.0, {"generator_gpu": 0.5, "num_generators": 3}, ["generator_gpu = 0.5 (3 of them)", "lower the shares"]),
        (2.0, {"generator_gpu": 0.7, "learner_gpu": 0.7, "reference_gpu": 0.6}, ["2 GPU in all", "there are 2"]),
        (2.0, {"generator_gpu": 1, "learner_gpu": 1, "reference_gpu": 0.1}, ["2.1 GPU", "there are 2"]),
        (0.5, {"generator_gpu": 0.1, "learner_gpu": 0.6, "reference_gpu": 0}, ["0.7 GPU", "there are 0.5"]),
        (2.9, {"generator_gpu": 1, "learner_gpu": 1, "reference_gpu": 1}, ["3 GPU in all", "there are 2.9"]),
    ],
)
def test_more_gpu_than_there_is(gpus: float, resources: dict, said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_resources(config(**resources), gpus)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_vllm_with_a_gpu_gets_a_share_of_it() -> None:
    wanted = config(generator_gpu=0).model_copy(update={"model": ModelConfig(engine="vllm")})
    with pytest.raises(ConfigError, match=r"generator_gpu = 0 with .*'vllm': .*; set it to null or a share"):
        plan_resources(wanted, 1.0)
    assert plan_resources(wanted, 0.0).generator_gpu == 0
    assert plan_resources(config(generator_gpu=0), 1.0).generator_gpu == 0
    shared = config().model_copy(update={"model": ModelConfig(engine="vllm")})
    assert plan_resources(shared, 1.0).generator_gpu > 0


@given(st.lists(st.integers(0, 20), min_size=3, max_size=3), st.integers(1, 4), st.integers(1, 3))
def test_what_is_accepted_can_be_placed(twentieths: list[int], generators: int, gpus: int) -> None:
    generator, reference, learner = (n / 20 for n in twentieths)
    wanted = config(generator_gpu=generator, reference_gpu=reference, learner_gpu=learner, num_generators=generators)
    left = sorted([twentieths[0]] * generators + twentieths[1:], reverse=True)

    def placeable(todo: list[int], free: tuple[int, ...]) -> bool:  # every placement there is
        if not todo:
            return True
        return any(
            placeable(todo[1:], (*free[:i], room - todo[0], *free[i + 1 :]))
            for i, room in enumerate(free)
            if room >= todo[0]
        )

    try:
        plan_resources(wanted, float(gpus))
    except ConfigError:
        if gpus == 1:
            assert sum(left) > 20, "on one GPU the sum alone decides"
    else:
        assert placeable(left, (20,) * gpus)


def test_the_plan_is_readable() -> None:
    lines = plan_resources(config(0.0, num_generators=2), 1.0).lines()
    assert lines == [
        "2 generators, each: 0.17 GPU, 1 CPU thread(s)",
        "reference: none (grpo.beta is 0)",
        "learner: 0.45 GPU, 1 CPU thread(s)",
    ]
    assert plan_resources(config(), 0.0).lines()[0] == "generator: CPU, 1 thread(s)"


# ---- what depends on a GPU's size ----

QWEN = 2 * 494_032_768  # bytes of Qwen2.5-0.5B in bfloat16


@pytest.mark.parametrize("gb", [16, 24, 48, 80, 141])
def test_the_defaults_leave_each_actor_its_context_and_its_work(gb):
    wanted, size = config().model_copy(update={"model": ModelConfig(dtype="bfloat16")}), gb * 1e9
    plan = plan_resources(wanted, 1.0, size)
    assert sum(tensor_bytes(share, size) + 0.5e9 for share in plan.shares) <= 0.95 * size + 3  # the rest: the driver
    assert f"learner: 0.45 GPU ({0.45 * gb - 0.5:.1f} GB and a CUDA context)" in plan.lines()[2]
    assert cache_bytes(tensor_bytes(plan.generator_gpu, size), QWEN) > 64 * 1024 * 12_288  # 64 rows of 1,024 tokens
    check_memory(plan, wanted, 2 * 134_515_008)  # SmolLM2-135M
    if gb >= 24:
        return check_memory(plan, wanted, QWEN)
    with pytest.raises(ConfigError, match=r"learner_gpu = 0\.45: of 16 GB .* 6\.7 .* takes 9\.88 there, 0\.65 of"):
        check_memory(plan, wanted, QWEN)


def test_vllm_gets_what_weights_and_workspace_leave():
    assert cache_bytes(0, 10**12) == CPU_CACHE
    assert cache_bytes(8_000_000_000, 1_000_000_000) == 5_500_000_000
    with pytest.raises(RunError, match=r"generator_gpu: of 2 GB .* take 1 .* no key or value fits; raise it"):
        cache_bytes(2_000_000_000, 1_000_000_000)


@pytest.mark.parametrize(
    ("gpus", "installed", "settings", "engine", "why"),
    [
        (0.0, True, {}, "hf", "there is no GPU"),
        (1.0, False, {}, "hf", "vLLM is not installed"),
        (1.0, True, {}, "vllm", "there is a GPU, and vLLM is installed"),
        (1.0, True, {"resources": {"generator_gpu": 0}}, "hf", "the generator has no share of the GPU"),
        (1.0, True, {"model": {"lora_r": 4}}, "hf", "vLLM gets no adapters"),
        (1.0, True, {"grpo": {"model_name": "tiny"}}, "hf", "the built-in model is small"),
        (1.0, True, {"model": {"engine": "hf"}}, "hf", "as model.engine says"),
    ],
)
def test_the_engine_is_chosen_and_the_run_says_why(monkeypatch, gpus, installed, settings, engine, why):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    wanted = ExperimentConfig.model_validate({"grpo": {"model_name": "some/model"}} | settings)
    found, line = resolve_engine(wanted, gpus)
    assert found.model.engine == engine
    assert line == f"engine: {engine} ({why})"
    if engine == "hf":  # so that a run begun where auto was hf, or before there was auto, goes on
        assert config_hash(found) == config_hash(wanted)
        assert differences(found.model_dump(mode="json"), wanted) == []
    else:
        assert differences(found.model_dump(mode="json"), wanted) == ["model.engine: vllm -> hf"]


@pytest.mark.parametrize(("dtype", "far"), [("float32", 0.02), ("bfloat16", 0.2)])
def test_an_engine_that_samples_from_another_policy_ends_the_run(dtype, far):
    mask = torch.tensor([[True, True, False]])
    check_logprobs(torch.tensor([[far / 4, -far / 4, 99.0]]), mask, dtype)
    for wrong in (-far, float("nan")):
        with pytest.raises(RunError, match=f"nats per token from the learner's .limit {far / 2:g} in {dtype}"):
            check_logprobs(torch.tensor([[wrong, wrong, 0.0]]), mask, dtype)


def test_weights_go_through_one_buffer_per_dtype_and_arrive_unchanged():
    first, buffers = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(())}, {}
    first["d"] = torch.ones(4).bfloat16()
    for weights in (first, {name: value + 1 for name, value in first.items()}):
        arrived = received(publish(1, to_host(weights, buffers)))
        assert arrived.keys() == weights.keys()
        assert all(torch.equal(arrived[n], value) and arrived[n].dtype == value.dtype for n, value in weights.items())
        assert {arrived["a"].data_ptr(), arrived["b"].data_ptr()} == {flat.data_ptr() for flat in buffers.values()}
    assert {dtype: len(flat) for dtype, flat in buffers.items()} == {torch.float32: 16, torch.bfloat16: 11}
