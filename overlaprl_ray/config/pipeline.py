"""When things happen: modes, lag, schedule, and whether batches or a stream of groups are generated.

PipelineConfig(generation="stream", lag=2, delay=20)
"""

from typing import Literal

from pydantic import Field

from overlaprl_ray.config.grpo import Count, Group, Positive, Share, Whole


class PipelineConfig(Group):
    """When things happen."""

    mode: Literal["sync", "async", "staleness", "overlap"] = Field(
        "overlap",
        description="sync: no overlap; async: generate ahead; staleness: and judge stale batches; overlap: and score "
        "with the reference meanwhile",
    )
    lag: int = Field(1, ge=0, le=64, description="batches generated ahead of training, 0 to 64 (sync: always 0)")
    late_share: Share = Field(0.0, description="chance of a late batch, by weights late_lag steps older still, 0 to 1")
    late_lag: int = Field(8, ge=1, le=64, description="how much older the weights of a late batch are, steps, 1 to 64")
    generation: Literal["batch", "stream"] = Field(
        "batch",
        description="batch: whole batches; stream: groups, each admitted when one has ended, and new weights are taken "
        "over between tokens",
    )
    slots: Count | None = Field(None, description="stream: rows decoded at once, >= group_size >= 2; null = a batch's")
    delay: Whole | None = Field(
        None,
        description="stream, exact: ticks (tokens of each row) from a batch's end until the weights of its step are "
        "taken over, >= 0; null = grpo.max_new_tokens",
    )
    refresh_every: Whole = Field(
        50,
        description="stream: steps between new computations of all caches, whose keys and values otherwise stay as old "
        "as their tokens; 0 = never",
    )
    schedule: Literal["exact", "latest"] = Field("exact", description="exact = replayable; latest = freshest weights")
    timeout_s: Positive = Field(1800.0, description="longest wait for any one actor call, seconds, > 0")
    max_restarts: Whole = Field(3, description="actors that may die and be restarted in one run, >= 0")
    on_fault: Literal["stop", "skip"] = Field(
        "stop",
        description="a batch with failing rewards or a gradient that is not finite ends the run, or is skipped",
    )
