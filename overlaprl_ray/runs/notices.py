"""What a user should know about a run that is neither an error nor a number: thresholds without effect.

notices(config, floor=1.6e-3, decisions={"fresh": 50, "stale": 0, "discard": 0})
"""

from collections.abc import Mapping

from overlaprl_ray.config import ExperimentConfig


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


def notices(config: ExperimentConfig, floor: float | None, decisions: Mapping[str, int]) -> list[str]:
    """Those that apply."""
    texts = [floor_notice(config, floor) if floor is not None else None, silence_notice(config, decisions)]
    return [text for text in texts if text]
