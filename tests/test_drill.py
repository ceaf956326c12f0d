"""The exactness drill: dozens of SIGKILLs and SIGTERMs at random moments, and never a different bit. Minutes long.

Each test prints what it did (pytest -m slow -s tests/test_drill.py). DRILL_KILLS, DRILL_STOPS: how many per test;
DRILL_SOAK_STEPS: length of the soak; with DRILL_PACE_S=0.25 (seconds a batch takes at least) 3000 are half an hour.
"""

import os
import random
import signal
import statistics
import threading
import time

import psutil
import pytest
from conftest import read_jsonl
from drill import (
    AGENTS,
    TITLES,
    assert_same,
    config_of,
    launch,
    oracle,
    outcome,
    pids,
    rows_written,
    wait_until,
    wait_until_gone,
    write_config,
)

from overlaprl_ray.runtime.train import train

KILLS = int(os.environ.get("DRILL_KILLS", "12"))
SOAK_STEPS = int(os.environ.get("DRILL_SOAK_STEPS", "600"))
STOPS = int(os.environ.get("DRILL_STOPS", "5"))
MODES = [("sync", 0), ("async", 3), ("staleness", 1), ("overlap", 2)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def long_run(folder, mode, lag, steps, max_restarts=1000):
    config = config_of(folder, mode, lag, steps, pipeline={"max_restarts": max_restarts})
    return config.with_setting("output.checkpoint_every", 10)


def writing_a_checkpoint(folder):
    return any((folder / "checkpoints").glob("step-*.part"))


class Killer(threading.Thread):
    """Kills actors of this process's Ray in turn at random moments, every other learner while it writes one."""

    def __init__(self, folder, rng, kills):
        super().__init__(daemon=True)
        self.folder, self.rng, self.left = folder, rng, kills
        self.killed = dict.fromkeys(TITLES, 0)
        self.while_writing = 0
        self.over = threading.Event()

    def run(self):
        while self.left and not self.over.wait(self.rng.uniform(0.05, 1.0)):
            if self.rng.random() < 0.75:  # else perhaps in the middle of a recovery
                row = rows_written(self.folder) + self.rng.randrange(1, 20)
                while rows_written(self.folder) < row:
                    if self.over.wait(0.005):
                        return
            role = min(self.killed, key=self.killed.get)
            wants_writing = role == "learner" and self.killed[role] % 2 == 0
            deadline = time.monotonic() + 20
            while wants_writing and not writing_a_checkpoint(self.folder) and time.monotonic() < deadline:
                if self.over.wait(0.001):
                    return
            for pid in pids(TITLES[role]):
                self.while_writing += wants_writing and writing_a_checkpoint(self.folder)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed[role] += 1
                self.left -= 1


@pytest.mark.parametrize(("mode", "lag"), MODES)
def test_actors_killed_at_random_moments(local_ray, tmp_path, mode, lag):
    rng, left, killed, writing, seed = random.Random(mode), KILLS, dict.fromkeys(TITLES, 0), 0, 0
    while left > 0:
        folder = tmp_path / f"run{seed}"
        config = long_run(folder, mode, lag, steps=300).with_setting("seed", seed)
        killer = Killer(folder, rng, left)
        killer.killed = dict(killed)
        killer.start()
        summary = train(config)
        killer.over.set()
        killer.join()
        assert summary["steps"] == 300
        assert_same(outcome(folder), oracle(config))
        left, killed, seed = killer.left, killer.killed, seed + 1
        writing += killer.while_writing
    print(f"\n{mode}: {killed} killed, {writing} while a checkpoint was written, {seed} runs, 0 differences")


def stop(process, folder, number, row, at_checkpoint, log):
    """Signal after a row, or in a checkpoint's writing after it; (seconds to the end, whether it was so, processes)."""
    wait_until(lambda: process.poll() is not None or rows_written(folder) >= row, f"row {row}", 600)
    if at_checkpoint:
        wait_until(lambda: process.poll() is not None or writing_a_checkpoint(folder), "a checkpoint", 600)
    assert process.poll() is None, log.read_text()
    writing = writing_a_checkpoint(folder)
    family = psutil.Process(process.pid).children(recursive=True)
    started = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 1), log.read_text()
    seconds = time.monotonic() - started
    wait_until_gone(family, 30, but=AGENTS if number == signal.SIGKILL else ())
    return seconds, writing, family


@pytest.mark.parametrize(("mode", "lag"), MODES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_driver_stopped_at_random_moments(tmp_path, mode, lag, number):
    rng, folder, log = random.Random(mode), tmp_path / "run", tmp_path / "log"
    config = long_run(folder, mode, lag, steps=60 * (STOPS + 1))
    write_config(tmp_path / "c.yaml", config)
    process, seen = launch("--config", tmp_path / "c.yaml", log=log), []
    for i in range(STOPS):
        row = rows_written(folder) + rng.randrange(1, 50)
        seen.append(stop(process, folder, number, row, at_checkpoint=i % 2 == 1, log=log))
        process = launch("--resume", folder, log=log)
    assert process.wait(1200) == 0, log.read_text()
    assert_same(outcome(folder), oracle(config))
    wait_until_gone([process for _, _, family in seen for process in family], 120)
    slowest, writing = max(seconds for seconds, _, _ in seen), sum(writing for _, writing, _ in seen)
    if number == signal.SIGTERM:
        assert slowest < 30
        assert log.read_text().count("resume with: python scripts/train.py --resume") == STOPS
    print(f"\n{mode}, {number.name}: {STOPS} stops ({writing} while a checkpoint was written), slowest {slowest:.1f} s")


def test_a_soak_with_an_actor_killed_every_20_to_60_seconds(local_ray, tmp_path):
    config = long_run(tmp_path / "run", "overlap", 1, SOAK_STEPS)
    over, kills, rng = threading.Event(), [], random.Random(0)
    driver = []

    def kill_now_and_then():
        while not over.wait(rng.uniform(20, 60)):
            role = rng.choice(sorted(TITLES))
            for pid in pids(TITLES[role]):
                os.kill(pid, signal.SIGKILL)
                kills.append(role)

    killer = threading.Thread(target=kill_now_and_then, daemon=True)
    started = time.monotonic()
    killer.start()
    summary = train(config, on_row=lambda row: driver.append(psutil.Process().memory_info().rss / 1e9))
    over.set()
    killer.join()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, SOAK_STEPS + 1))
    os.environ["DRILL_PACE_S"] = "0"
    assert_same(outcome(tmp_path / "run"), oracle(config))
    quarter = SOAK_STEPS // 4
    growth = {}
    for name in ("memory/generator_gb", "memory/reference_gb", "memory/learner_gb"):
        values = [row[name] for row in rows]
        growth[name] = statistics.median(values[-quarter:]) / statistics.median(values[quarter : 2 * quarter])
    growth["driver"] = statistics.median(driver[-quarter:]) / statistics.median(driver[quarter : 2 * quarter])
    assert all(ratio < 1.15 for ratio in growth.values()), growth
    took = time.monotonic() - started
    print(f"\nsoak: {took:.0f} s, {SOAK_STEPS} steps, {len(kills)} kills, {summary['restarts']} "
          f"restarts; memory, last to second quarter: { {n: round(r, 3) for n, r in growth.items()} }")  # fmt: skip
