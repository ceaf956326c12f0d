"""The Grafana dashboard: the panels of grafana.yaml as the JSON that Grafana reads.

json.dumps(dashboard())
"""

import math
import re
from importlib.resources import files
from typing import Any

import yaml


def dashboard() -> dict[str, Any]:
    """Under the heading of each row its panels, three to a line; Grafana's board is 24 units wide."""
    board = yaml.safe_load((files("overlaprl_ray.runs") / "grafana.yaml").read_text(encoding="utf-8"))
    panels, y = [], 0
    for title, row in board.pop("rows").items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        for i, panel in enumerate(row):
            panels.append(_panel(**panel, gridPos={"h": 8, "w": 8, "x": 8 * (i % 3), "y": y + 1 + 8 * (i // 3)}))
        y += 1 + 8 * math.ceil(len(row) / 3)
    return {**board, "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)]}


def _panel(queries: dict[str, str], **panel: Any) -> dict[str, Any]:
    targets = [
        {
            "refId": reference,
            "expr": re.sub(r"(\w+)\{", r'ray_overlaprl_\1{run=~"$run",trial=~"$trial",', query),
            "legendFormat": f"{legend} {{{{run}}}} {{{{trial}}}}".strip(),
        }
        for reference, (legend, query) in zip("AB", queries.items(), strict=False)
    ]
    shared = {
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
    }
    return {**shared, **panel, "targets": targets}
