"""Discarded rows against a plain recount; and the notices about thresholds."""

import pytest
import torch
from conftest import make_rollout, small

from overlaprl_ray.config.staleness import DECISIONS
from overlaprl_ray.engines.hf import Generated
from overlaprl_ray.runs.notices import floor_notice, notices, signal_notice, silence_notice
from overlaprl_ray.runs.summary import BINS, discard_report
from overlaprl_ray.workers.cells import cells_of

ROWS, TOKENS = 24, 8


@pytest.fixture
def rollout():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    mask = torch.arange(TOKENS)[None] < lengths[:, None]
    out = Generated(torch.ones(ROWS, TOKENS, dtype=torch.long), mask, torch.zeros(ROWS, TOKENS), mask[:, -1])
    rewards = torch.rand(ROWS, generator=generator) * 1.4 - 0.2  # some outside 0 to 1: clipped
    return make_rollout([[1]] * ROWS, out, rewards=rewards, reward_parts={"r": rewards})


def test_cells_count_every_row_once_in_its_bins(rollout):
    decision = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(1))
    cells = cells_of(rollout, decision, group_size=4, max_new_tokens=TOKENS)
    expected = {}
    for row in range(ROWS):
        group = rollout.rewards[row // 4 * 4 : row // 4 * 4 + 4]
        traits = (rollout.completion_mask[row].sum().item() / TOKENS, rollout.rewards[row].item(), group.mean().item())
        key = (*(min(3, max(0, int(4 * max(0.0, value)))) for value in traits), DECISIONS[decision[row]])
        expected[key] = expected.get(key, 0) + 1
    assert {tuple(cell[:-1]): cell[-1] for cell in cells} == expected
    assert sum(cell[-1] for cell in cells) == ROWS


def rows_of_file():
    cells = [[0, 0, 1, "fresh", 3], [3, 0, 1, "discard", 1]]
    return [
        {"step": 1, "lag": 0, "generate_s": 2.0, "cells": cells},
        {"step": 2, "lag": 4, "generate_s": 1.0, "cells": [[3, 3, 3, "discard", 4]]},
    ]


def test_the_summary_adds_up_and_names_the_seconds_wasted():
    found = discard_report(rows_of_file())
    assert found["generation_s_wasted"] == pytest.approx(2.0 * 1 / 4 + 1.0)
    assert found["by"]["length"] == [
        {"bin": BINS[0], "fresh": 3, "stale": 0, "discard": 0},
        {"bin": BINS[3], "fresh": 0, "stale": 0, "discard": 5},
    ]
    assert found["by"]["lag"] == [
        {"bin": "0", "fresh": 3, "stale": 0, "discard": 1},
        {"bin": "4", "fresh": 0, "stale": 0, "discard": 4},
    ]
    for trait in found["by"].values():
        assert sum(sum(v for k, v in cell.items() if k != "bin") for cell in trait) == 8
    assert discard_report([]) == {
        "generation_s_wasted": 0.0,
        "by": {k: [] for k in ("length", "reward", "difficulty", "lag")},
    }


def config_of(mode="staleness", **staleness):
    return small(pipeline={"mode": mode}, staleness=staleness)


def test_notices_name_thresholds_under_the_floor_and_rules_that_never_fired():
    fired, silent = {"fresh": 3, "stale": 1, "discard": 0}, {"fresh": 4, "stale": 0, "discard": 0}
    assert "under the numerical floor 0.0016" in floor_notice(config_of(kl_fresh=1e-3), 1.6e-3)
    assert floor_notice(config_of(kl_fresh=2e-3), 1.6e-3) is None
    assert floor_notice(config_of(kl_fresh=0.5, threshold_unit="floor", kl_stale=3), 1.6e-3)
    assert floor_notice(config_of(kl_fresh=1.5, threshold_unit="floor", kl_stale=3), 1.6e-3) is None
    assert floor_notice(config_of(kl_fresh=1e-3, rule="version"), 1.6e-3) is None
    assert "rule kl never fired" in silence_notice(config_of(), silent)
    assert silence_notice(config_of(), fired) is None
    assert silence_notice(config_of(mode="async"), silent) is None  # no rule was on
    assert silence_notice(config_of(), {"fresh": 0, "stale": 0, "discard": 0}) is None  # nor any step
    assert len(notices(config_of(kl_fresh=1e-3), 1.6e-3, silent)) == 2
    assert notices(config_of(kl_fresh=1e-3), None, fired) == []


def test_twenty_steps_without_signal_are_said_once_and_again_in_the_summary():
    shares = [0.5, *[1.0] * 25, 0.0, *[1.0] * 19, 0.0, *[1.0] * 20]
    rows = [{"step": i, "reward": 0.0, "frac_reward_zero_std": share} for i, share in enumerate(shares, start=1)]
    said = {end: text for end in range(len(rows) + 1) if (text := signal_notice(rows[:end]))}
    assert list(said) == [21, 67]
    assert "no group had signal in steps 2 to 21: " in said[21]
    fired = {"fresh": 3, "stale": 1, "discard": 0}
    assert notices(config_of(), None, fired, rows) == [said[21]]
    assert notices(config_of(), None, fired, rows[:20]) == []
