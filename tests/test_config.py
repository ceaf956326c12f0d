"""The settings: the default, what is refused, and that nothing but `ConfigError` ever comes out of `build_config`."""

import math
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlaprl_ray import ExperimentConfig, GRPOConfig, StalenessConfig, StalenessScheduler
from overlaprl_ray.config.cli import build_config, fields, load_config, merge
from overlaprl_ray.config.grpo import TINY_DEFAULTS
from overlaprl_ray.errors import ConfigError

NAMES = [name for name, _ in fields()]


# ---- What is accepted ----


def test_the_default_is_the_built_in_one() -> None:
    config = ExperimentConfig()
    assert config == build_config({}) == ExperimentConfig(grpo=GRPOConfig())
    assert {name: getattr(config.grpo, name) for name in TINY_DEFAULTS} == TINY_DEFAULTS
    assert (config.grpo.model_name, config.task.name, config.pipeline.mode) == ("tiny", "arithmetic", "overlap")


def test_settings_for_the_built_in_model_go_with_it_alone() -> None:
    plain = {name: GRPOConfig.model_fields[name].default for name in TINY_DEFAULTS}
    other = GRPOConfig(model_name="Qwen/Qwen2.5-0.5B")
    assert {name: getattr(other, name) for name in TINY_DEFAULTS} == plain
    assert all(plain[name] != TINY_DEFAULTS[name] for name in plain), "a tiny default equal to the plain one is idle"
    given_lr = GRPOConfig(lr=1e-5)
    assert given_lr.lr == 1e-5, "what is given beats both"
    assert given_lr.num_steps == TINY_DEFAULTS["num_steps"]


def test_snippets_of_the_readme_run() -> None:
    given = {"model_name": "Qwen/Qwen2.5-0.5B", "lr": 1e-5, "num_steps": 50, "num_prompts_per_step": 4, "group_size": 8}
    grpo = GRPOConfig(**given, max_new_tokens=256, clip_eps=0.2, beta=0.04, temperature=0.7)
    assert (grpo.lr, grpo.batch_rows, grpo.update_rows) == (1e-5, 32, 32)
    scheduler = StalenessScheduler(StalenessConfig(kl_fresh=0.05, kl_stale=0.15, min_weight=0.1))
    kl = scheduler.measure_staleness([-1.0, -2.0], [-1.0, -2.0])
    decision = scheduler.decide(kl)
    assert (kl, decision.decision, decision.weight, decision.kl_divergence) == (0.0, "fresh", 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grpo.lr: 0.001", {"grpo.lr": 0.001}),
        ("grpo.lr: 0.001\ngrpo: {num_steps: 7}", {"grpo.lr": 0.001, "grpo.num_steps": 7}),
        ("model: {tiny.layers: 1}\nmodel.tiny: {heads: 2}", {"model.tiny.layers": 1, "model.tiny.heads": 2}),
        ("x-a: &a {lr: 0.1, beta: 0.0}\ngrpo: {<<: *a, lr: 0.2}", {"grpo.lr": 0.2, "grpo.beta": 0.0}),
        ("x-a: &a {lag: 2}\nx-b: &b {<<: *a, mode: async}\npipeline: {<<: *b}", {"pipeline.lag": 2}),
        ("x-a: &a {lag: 2}\nx-b: &b {mode: async}\npipeline: {<<: [*a, *b]}", {"pipeline.mode": "async"}),
        ("grpo: {num_steps: 010}", {"grpo.num_steps": 10}),
        ("seed: 0017", {"seed": 17}),
        ("grpo.lr: 0.001\ngrpo: {lr: 0.1}", "grpo.lr is given twice, by its dotted name and in its group"),
        ("model.tiny.layers: 1\nmodel: {tiny.layers: 2}", "model.tiny.layers is given twice"),
        ("grpo.lrr: 1", "grpo.lrr: unknown setting (value 1); did you mean 'grpo.lr'?"),
        ("a: &a {lag: 2}\npipeline: {<<: *a}", "a: unknown setting"),
        ("task: {gym: {size: 0x10, seed: -011}}", {"task.gym": {"size": 16, "seed": -11}}),
    ],
)
def test_yaml_as_people_mean_it(tmp_path: Path, text: str, expected: dict[str, Any] | str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            load_config(tmp_path / "c.yaml")
        return
    config = load_config(tmp_path / "c.yaml")
    assert {name: attrgetter(name)(config) for name in expected} == expected


def test_every_setting_is_described() -> None:
    assert len(NAMES) == len(set(NAMES)) > 50
    assert set(CONTRACT.split()) <= set(NAMES)
    for name, field in fields():
        assert field.description, name
        if any(kind in str(field.annotation) for kind in ("int", "float")):
            assert any(c.isdigit() for c in field.description), f"{name} states no limit: {field.description}"


# the names other scripts and written configurations rely on
CONTRACT = """seed grpo.model_name grpo.lr grpo.num_steps grpo.num_prompts_per_step grpo.group_size grpo.max_new_tokens
grpo.clip_eps grpo.beta grpo.temperature grpo.micro_batch_size grpo.num_minibatches grpo.num_iterations grpo.loss_type
grpo.correction grpo.max_grad_norm pipeline.mode pipeline.lag pipeline.schedule task.name
task.path task.rewards staleness.rule staleness.max_lag staleness.granularity staleness.apply_to staleness.kl_fresh
staleness.kl_stale staleness.min_weight resources.num_generators output.dir output.eval_every"""


def test_the_clip_has_two_sides_or_none() -> None:
    assert GRPOConfig(clip_eps=0.2).trust_region == (0.8, 1.2)
    assert GRPOConfig(clip_eps=0.2, clip_eps_high=0.5).trust_region == (0.8, 1.5)
    assert GRPOConfig(clip_eps=None).trust_region == (0.0, math.inf)


def test_modes_decide_lag_and_rule() -> None:
    for mode, lag, rule in [("sync", 0, "none"), ("async", 3, "none"), ("staleness", 3, "kl"), ("overlap", 3, "kl")]:
        config = build_config({"pipeline": {"mode": mode, "lag": 3}})
        assert (config.lag, config.rule) == (lag, rule)


# ---- What is refused ----

nan, inf = math.nan, math.inf

# refused by every setting of a kind
NO_NUMBER = (nan, inf, -inf, -1, 2**31, 1e308, 10**400, True, "fast", [1e-5], {"a": 1})
WRONG = {"number": NO_NUMBER, "bool": (1, 1.0, "yes", None), "choice": ("other", 1, True, []), "text": (5, True, [1])}
ABOVE_0 = """grpo.lr grpo.temperature grpo.correction_cap grpo.max_grad_norm grpo.adam_eps pipeline.timeout_s
staleness.kl_token_cap staleness.kl_stale task.reward_timeout_s resources.start_timeout_s"""
COUNTS = """grpo.num_prompts_per_step grpo.max_new_tokens grpo.micro_batch_size grpo.num_minibatches grpo.num_iterations
resources.threads task.eval_size"""
WHOLE = "grpo.lr_warmup_steps output.eval_every staleness.max_lag"
SHARES = """grpo.lr_min_ratio staleness.min_weight staleness.discard_probability resources.learner_gpu
model.tiny.warm_start_reward"""
OUTSIDE: dict[str, tuple[Any, ...]] = {  # and what else is refused
    **dict.fromkeys(ABOVE_0.split(), (0,)),
    **dict.fromkeys(COUNTS.split(), (0, 1.5, 10**7)),
    **dict.fromkeys(WHOLE.split(), (1.5, 10**7)),
    **dict.fromkeys(SHARES.split(), (1.1,)),
    **dict.fromkeys(["grpo.adam_beta1", "grpo.adam_beta2", "grpo.clip_eps", "grpo.dual_clip"], (1,)),
    "grpo.num_steps": (0, 1.5, 10**7, 0xF**9000), "grpo.group_size": (1, 2.5, 10**9), "pipeline.lag": (65, 1.5),
    "grpo.correction_band": ([0, 1], [1], 0.5, [0.5, nan]), "grpo.model_name": (None,), "seed": (1.5,),
    "model.tiny.hidden": (12, 0, 10**6), "task.digits": (0, 5), "resources.num_generators": (0, 10**5),
    "task.name": ("chess", None), "task.rewards": ("math", None, [1], [None], {"math": 1}), "output.dir": ("", "a\0b"),
    "task.reward_weights": ([nan], [inf], ["a"], 1.0, [1e308]),
}  # fmt: skip


def kind_of(annotation: str) -> str | None:
    """Of a setting, by its type; None for lists and mappings."""
    if re.search("list|dict|tuple|date", annotation):
        return None
    kinds = {"Literal": "choice", "int": "number", "float": "number", "bool": "bool", "str": "text"}
    return next(kind for word, kind in kinds.items() if word in annotation)


BAD = [
    (name, value)
    for name, field in fields()
    for value in (*WRONG.get(kind_of(str(field.annotation)) or "", ()), *OUTSIDE.get(name, ()))
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_bad_values(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(merge({}, {name: value}))
    message = str(error.value)
    description = dict(fields())[name].description
    assert message.startswith(f"config: {name}")
    assert "\n" not in message
    assert str(description) in message, "the remedy"
    assert " = " in message, "the value"
    assert len(message) < 500


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"staleness": {"kl_fresh": 0.2}}, ["staleness.kl_fresh=0.2", "below kl_stale=0.15", "try 0.05 and 0.15"]),
        ({"staleness": {"kl_fresh": 0.15}}, ["staleness.kl_fresh=0.15", "below kl_stale=0.15"]),
        ({"grpo": {"num_minibatches": 3}}, ["grpo.num_minibatches=3", "divide num_prompts_per_step=32"]),
        (
            {"staleness": {"apply_to": "lr", "granularity": "group"}},
            ["staleness.apply_to=lr", "granularity=group", "use apply_to=update"],
        ),
        (
            {"staleness": {"apply_to": "lr", "rule": "opsm"}},
            ["staleness.apply_to=lr", "rule=opsm", "only with kl and ess"],
        ),
        ({"staleness": {"rule": "ess"}}, ["staleness.rule=ess", "not apply_to=update", "use apply_to=lr"]),
        ({"grpo": {"clip_eps": None, "clip_eps_high": 0.3}}, ["grpo.clip_eps=null", "clip_eps_high=0.3", "null, too"]),
        ({"task": {"reward_weights": [1, 2]}}, ["task.reward_weights", "2 entries for 1", "one weight per reward"]),
        ({"task": {"rewards": ["math", "gsm8k"], "reward_weights": [1]}}, ["task.reward_weights", "1 entries for 2"]),
        ({"task": {"reward_weights": []}}, ["task.reward_weights", "0 entries for 1"]),
        ({"model": {"tiny": {"heads": 3}}}, ["model.tiny.heads=3", "hidden=64", "try 4 and 64"]),
        (
            {"staleness": {"granularity": "group"}, "grpo": {"micro_batch_size": 12}},
            ["staleness.granularity=group", "grpo.micro_batch_size=12", "multiple of grpo.group_size=8"],
        ),
        (
            {"resources": {"num_generators": 3}, "grpo": {"num_prompts_per_step": 2}},
            ["resources.num_generators=3", "grpo.num_prompts_per_step=2"],
        ),
        ({"pipeline": {"late_share": 0.2}}, ["output.checkpoint_every=50 cannot be combined with pipeline.late_share"]),
        ({"pipeline": {"late_share": 0.2, "schedule": "latest"}}, ["pipeline.schedule=latest: late batches"]),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(values)
    assert all(part in str(error.value) for part in said), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": 1}, "did you mean 'grpo.lr'?"),
        ({"grpo": {"group_sise": 8}}, "did you mean 'grpo.group_size'?"),
        ({"gropo": {"lr": 1}}, "did you mean 'grpo'?"),
        ({"model": {"tiny": {"layer": 1}}}, "did you mean 'model.tiny.layers'?"),
        ({"pipeline": {"kl_fresh": 1}}, "did you mean 'staleness.kl_fresh'?"),
        ({"xyzzy": 1}, "xyzzy: unknown setting (value 1); --help lists all settings"),
        ({"grpo": {"a": 1, "b": 2}}, "(and 1 more)"),
        ({1: 2}, "1"),
        ({"grpo": None}, "grpo = None"),
        ({"model": {"tiny": []}}, "model.tiny = []"),
    ],
)
def test_unknown_settings(values: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(values)
    assert said in str(error.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
GROUPS = st.sampled_from(sorted({n.rpartition(".")[0] for n in NAMES} - {""} | {"nope", "grpo.lr.deep"}))


@settings(max_examples=300, deadline=None)
@given(st.one_of(JUNK, st.builds(lambda name, value: merge({}, {name: value}), st.sampled_from(NAMES) | GROUPS, JUNK)))
@example({"grpo": {"num_steps": 10**5000}})
@example([])
@example({"task": {"gym": {"": b""}}})
@example({"task": {"gym": {"a": float("nan")}}})
@example({"task": {"gym": {"a": {1: 2}}}})
def test_junk_raises_nothing_but_config_error(values: Any) -> None:
    try:
        config = build_config(values)
    except ConfigError as refusal:
        message = str(refusal)
    else:
        message = "config: accepted"
        assert build_config(config.model_dump(mode="json")) == config
    assert message.startswith("config: ")
    assert len(message) < 1000


def test_sync_has_no_late_batches() -> None:
    late = {"mode": "sync", "late_share": 0.2, "late_lag": 5}
    assert build_config({"pipeline": late}).late_lag == 0
    assert build_config({"pipeline": late | {"mode": "async"}, "output": {"checkpoint_every": 0}}).late_lag == 5
