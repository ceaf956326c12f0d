"""Watching a run: TensorBoard, Weights & Biases, Prometheus, Grafana, Gantt chart. `telemetry.py` has the metrics."""
