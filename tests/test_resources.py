"""GPU shares: the defaults fit one GPU, and whatever is accepted can be placed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._common.ray_option_utils import validate_actor_options

from overlaprl_ray.config import ExperimentConfig, ModelConfig
from overlaprl_ray.errors import ConfigError
from overlaprl_ray.runtime.resources import Plan, plan_resources


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
    ],
)
def test_more_gpu_than_there_is(gpus: float, resources: dict, said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_resources(config(**resources), gpus)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_one_share_is_of_one_gpu() -> None:
    plan = plan_resources(config(generator_gpu=1, learner_gpu=1, reference_gpu=1), 3.0)
    assert shares(plan) == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError):
        plan_resources(config(generator_gpu=1, learner_gpu=1, reference_gpu=1), 2.9)


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
