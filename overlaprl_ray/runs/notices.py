"""What a user should know about a run that is neither an error nor a number: thresholds without effect.

notices(config, floor=1.6e-3, decisions={"fresh": 50, "stale": 0, "discard": 0})
"""

from collections.abc import Mapping, Sequence
from typing import Any

from overlaprl_ray.config import ExperimentConfig

WITHOUT_SIGNAL = 20  # steps in a row in which no group has signal, from which on that is said


def floor_notice(config: ExperimentConfig, floor: float) -> str | None:
    """A warning where `kl_fresh` lies under the numerical floor: even a batch from the current policy is then stale."""
    settings = config.staleness
    kl_fresh = settings.kl_fresh * (floor if settings.threshold_unit == "floor" else 1.0)
    if config.rule != "kl" or kl_fresh >= floor:
        return None
    return (
        f"warning: staleness.kl_fresh is {kl_fresh:.3g} nats, under the numerical floor {floor:.3g} measured on the "
        "first batch: fresh rollouts count as stale; raise it"
    )


def silence_notice(config: ExperimentConfig, decisions: Mapping[str, int]) -> str | None:
    """A notice where the rule never fired: the run then equals one without a rule."""
    if config.rule == "none" or not decisions["fresh"] or decisions["stale"] or decisions["discard"]:
        return None
    return f"notice: rule {config.rule} never fired, every step was fresh: this run equals one with staleness.rule none"


def signal_notice(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning once no group had signal, that is completions of different reward, in so many steps in a row."""
    silent = [row["frac_reward_zero_std"] == 1.0 for row in rows[-WITHOUT_SIGNAL - 1 :]]
    if len(rows) < WITHOUT_SIGNAL or not all(silent[-WITHOUT_SIGNAL:]) or silent[:-WITHOUT_SIGNAL] == [True]:
        return None
    last = rows[-WITHOUT_SIGNAL:]
    return (
        f"warning: no group had signal in steps {last[0]['step']} to {last[-1]['step']}: all completions of a prompt "
        f"got the same reward (mean {last[-1]['reward']} in the last step), so rewards taught nothing; compare "
        "completions.jsonl with what task.rewards look for"
    )


def notices(
    config: ExperimentConfig, floor: float | None, decisions: Mapping[str, int], rows: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Those that apply to a run with these rows."""
    first_silent = (signal_notice(rows[:end]) for end in range(WITHOUT_SIGNAL, len(rows) + 1))
    texts = [
        floor_notice(config, floor) if floor is not None else None,
        silence_notice(config, decisions),
        next(filter(None, first_silent), None),
    ]
    return [text for text in texts if text]
