"""Sweeps with Ray Tune: from one YAML file to one table."""
