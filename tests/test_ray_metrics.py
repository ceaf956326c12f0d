"""Metrics at Ray's own port: names, tags, persistence and cost."""

import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import small
from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Gauge

from overlaprl_ray.config.identity import config_hash
from overlaprl_ray.runs.ray_metrics import GAUGES, PHASES, STAGES, Metrics, Watched, during, tags_of

TAGS = {"trial": "none", "mode": "overlap", "seed": "0"}


def at_port(prefix: str = "ray_overlaprl_") -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name -> [(labels, value)], as Prometheus would read them now."""
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(url, timeout=30).read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found, name: str, **labels: str) -> float:
    """The one value of a metric with these labels."""
    (only,) = [number for tags, number in found.get(name, []) if labels.items() <= tags.items()]
    return only


def a_row(step: int, **values) -> dict:
    """A row of metrics.jsonl."""
    row = dict.fromkeys(GAUGES.values(), step / 4)
    times = {f"time/{stage}": 0.25 for stage in STAGES}
    memory = {"memory/generator_gb": 0.5, "memory/learner_gb": 0.75}
    return {**row, **times, **memory, "step": step, "tokens": 100 * step, "samples": 16 * step,
            "faults": 0, "staleness/decision": "fresh", **values}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "run", "trial"),
    [
        (None, "run", "none"),
        ("runs/x", "x", "none"),
        ("/data/lags/trials/{hash}", "lags", "{hash}"),
        ("/data/trials/mine", "mine", "none"),  # a user's own folder of that name
        ("runs/läuft", "l\\xe4uft", "none"),  # Ray's metrics know no other letters
    ],
)
def test_tags_follow_from_the_settings(folder, run, trial):
    config = small(pipeline={"mode": "async"}, seed=7)
    name = config_hash(config)
    config = config.with_setting("output.dir", folder and folder.format(hash=name))
    assert tags_of(config) == {"run": run, "trial": trial.format(hash=name), "mode": "async", "seed": "7"}


def test_rows_arrive_at_rays_port_with_tags_and_totals(local_ray):
    config = small(output={"dir": "runs/portö"})
    before = {"step": 2, "tokens": 200, "samples": 32}  # the run was resumed after its second step
    metrics = Metrics(config, before)
    metrics.set("accuracy", 0.625)
    cells = [(0, 3, 1, "fresh", 10), (3, 0, 1, "discard", 6)]
    metrics.step(a_row(3), cells, queue_depth=2)
    held = dict.fromkeys(("kl_ref", "loss", "grad_norm"))  # missing in a discarded step
    metrics.step(a_row(4, **held, **{"staleness/decision": "discard", "time/reference": None}), cells, queue_depth=1)
    tags = {**TAGS, "run": "port\\xf6"}

    def exported() -> bool:  # earlier runs of the same Ray are there too
        return any(tags.items() <= labels.items() and n == 4 for labels, n in found.get("ray_overlaprl_step", []))

    deadline, found = time.monotonic() + 60, at_port()
    while not exported() and time.monotonic() < deadline:
        time.sleep(1)
        found = at_port()
    metrics.close()

    def gauge(name: str, **labels: str) -> float:
        return value(found, f"ray_overlaprl_{name}", **tags, **labels)

    for name, column in GAUGES.items():
        expected = 0.75 if column in held else 1.0
        assert gauge(name) == (4 if column == "step" else expected), name
    assert gauge("accuracy") == 0.625
    assert gauge("queue_depth") == 1
    assert gauge("memory_gb", actor="learner") == 0.75
    assert gauge("steps_total") == 2
    assert gauge("tokens_total") == 200
    assert gauge("samples_total") == 32
    assert gauge("decisions_total", decision="fresh") == gauge("decisions_total", decision="discard") == 1
    assert gauge("rows_total", decision="discard", trait="reward", quarter="0") == 12
    assert gauge("rows_total", decision="fresh", trait="length", quarter="0") == 20
    assert gauge("stage_seconds_total", stage="train") == 0.5
    assert gauge("stage_seconds_total", stage="reference") == 0.25
    assert gauge("stage_duration_seconds_count", stage="train") == 2
    assert gauge("stage_duration_seconds_bucket", stage="train", le="0.2") == 0
    assert gauge("stage_duration_seconds_bucket", stage="train", le="0.5") == 2


class Worker(Watched):
    """An actor that can be watched."""

    def phases(self):
        """Its phase outside, inside, nested, and after an error."""
        seen = [self.phase]
        seen += self.train()
        with pytest.raises(ValueError, match="no"):
            self.fail()
        return [*seen, self.phase]

    def who(self):
        """What Ray puts before its log lines."""
        return repr(self)

    @during("train")
    def train(self):
        """A phase with another inside."""
        return [self.phase, self.publish(), self.phase]

    @during("publish")
    def publish(self):
        """The inner one."""
        return self.phase

    @during("score")
    def fail(self):
        """One that raises."""
        raise ValueError("no")

    @during("evaluate")
    def work(self, seconds):
        """A slow one."""
        time.sleep(seconds)


def start(name: str, config) -> Any:
    """A worker that can import what this test can."""
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}}
    return ray.remote(Worker).options(name=name, num_cpus=0, runtime_env=environment).remote(config)


def test_an_actor_has_a_phase_and_a_name(local_ray):
    actor = start("phases/learner", small())
    assert ray.get(actor.phases.remote()) == ["idle", "train", "publish", "train", "idle"]
    assert ray.get(actor.who.remote()) == "phases/learner"
    ray.kill(actor)


@pytest.mark.slow
def test_gauges_stay_for_as_long_as_a_phase_or_a_step_takes(local_ray):
    """Left alone, Ray takes a gauge off its port some twenty seconds after it was last set."""
    config = small(output={"dir": "runs/long"})
    actor = start("long/generator", config)
    working = actor.work.remote(45)
    metrics = Metrics(config)
    metrics.set("accuracy", 0.5)
    metrics.metric(Gauge, "queue_depth", {}).set(3)  # past the thread that repeats it
    time.sleep(40)
    found = at_port()
    assert value(found, "ray_overlaprl_phase", actor="generator", run="long") == PHASES.index("evaluate")
    assert value(found, "ray_overlaprl_accuracy", run="long") == 0.5
    assert not [tags for tags, _ in found.get("ray_overlaprl_queue_depth", []) if tags["run"] == "long"]
    metrics.close()
    ray.get(working)
    ray.kill(actor)


def test_metrics_cost_less_than_a_hundredth_of_a_step(local_ray, tmp_path):
    """A step of the built-in default, the fastest here, takes about 0.25 s. The best of several tries counts."""
    from overlaprl_ray.runs.loggers import RunLoggers

    loggers = RunLoggers(small(output={"dir": str(tmp_path)}), Path(tmp_path))
    cells = [(i, j, k, "fresh", 4) for i in range(4) for j in range(4) for k in range(4)]
    costs = []
    for _ in range(10):
        started = time.perf_counter()
        for step in range(1, 11):
            loggers.step(a_row(step), cells, 1)
        costs.append((time.perf_counter() - started) / 10)
    loggers.close()
    assert min(costs) < 0.01 * 0.25, f"{1e3 * min(costs):.2f} ms per step"
    metrics = Metrics(small())
    started = time.perf_counter()
    for _ in range(1000):
        metrics.set("accuracy", 0.5)
    # nine changes of phase per step: two and back in each of three actors, and publishing
    assert 9 * (time.perf_counter() - started) / 1000 < 0.001 * 0.25
    metrics.close()
