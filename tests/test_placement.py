"""What a trial reserves and where its actors go: closed forms, and no Ray."""

import pytest

from overlaprl_ray import ConfigError, ExperimentConfig
from overlaprl_ray.tune.placement import strategy, trial_bundles
from overlaprl_ray.tune.spec import TuneSettings

TWO_CORES = [(2.0, 0.0)]
ONE_GPU = [(2.0, 1.0)]


def bundles(nodes=TWO_CORES, tune=None, **groups):
    return trial_bundles(ExperimentConfig(**groups), TuneSettings(**(tune or {})), nodes)


def total(found, kind):
    return sum(bundle.get(kind, 0.0) for bundle in found)


@pytest.mark.parametrize(
    ("mode", "threads", "cores"),
    [("sync", 1, 1), ("async", 1, 2), ("staleness", 1, 2), ("overlap", 1, 2), ("sync", 2, 2), ("overlap", 8, 2)],
)
def test_without_a_gpu_the_mode_and_its_threads_decide_and_a_trial_always_fits(mode, threads, cores):
    found = bundles(pipeline={"mode": mode}, resources={"threads": threads})
    assert len(found) == 3  # one per actor
    assert total(found, "CPU") == pytest.approx(cores, abs=1e-3)
    assert total(found, "CPU") <= cores
    assert total(found, "GPU") == 0


def test_a_serial_trial_reserves_its_threads_and_settings_override():
    assert bundles(tune={"serial": True}) == [{"CPU": 1.0}]
    assert bundles(tune={"serial": True}, resources={"threads": 2}) == [{"CPU": 2.0}]
    assert total(bundles(tune={"cpus_per_trial": 0.5}), "CPU") == pytest.approx(0.5, abs=1e-3)
    assert len(bundles(grpo={"beta": 0.0})) == 2  # no reference actor, no bundle for it
    assert len(bundles(resources={"num_generators": 3})) == 5


def test_on_a_gpu_its_shares_decide():
    shares = {"generator_gpu": 0.15, "reference_gpu": 0.1, "learner_gpu": 0.2}
    found = bundles(ONE_GPU, resources=shares)
    assert [bundle["GPU"] for bundle in found] == [0.15, 0.1, 0.2]
    assert total(found, "CPU") == 0
    with pytest.raises(ConfigError, match=r"1.15 GPU in all, but there are 1"):
        bundles(ONE_GPU, resources={**shares, "learner_gpu": 0.9})
    with pytest.raises(ConfigError, match=r"0.45 GPU in all, but there are 0"):
        bundles(TWO_CORES, resources=shares)


def test_a_trial_stays_on_one_node_if_any_node_is_large_enough():
    two_nodes = 2 * ONE_GPU
    thirds = bundles(two_nodes, resources={"generator_gpu": 0.3, "reference_gpu": 0.3, "learner_gpu": 0.3})
    assert strategy(thirds, two_nodes) == "STRICT_PACK"
    whole = bundles(two_nodes, resources={"generator_gpu": 1.0, "reference_gpu": 0.0, "learner_gpu": 1.0})
    assert strategy(whole, two_nodes) == "PACK"
    assert all(sum(bundle.values()) > 0 for bundle in whole)  # Ray refuses an empty one
    assert strategy([{"CPU": 1.5}, {"CPU": 1.5}], [(2.0, 0.0), (4.0, 0.0)]) == "STRICT_PACK"
    assert strategy([{"CPU": 1.5}, {"CPU": 1.5}], 2 * TWO_CORES) == "PACK"
