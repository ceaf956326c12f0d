"""A run's decisions.jsonl as a table.

decisions_table("runs/x").groupby(["length", "decision"])["rows"].sum()
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from overlaprl_ray.workers.results import TRAITS


def tidy(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """A row per cell: step, lag, length, reward, difficulty (bin 0 to 3), decision, rows."""
    columns = ["step", "lag", *TRAITS, "decision", "rows"]
    return pd.DataFrame([(row["step"], row["lag"], *cell) for row in rows for cell in row["cells"]], columns=columns)


def decisions_table(folder: str | Path) -> pd.DataFrame:
    """The `tidy` table of a run's folder."""
    lines = (Path(folder) / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return tidy(json.loads(line) for line in lines)
