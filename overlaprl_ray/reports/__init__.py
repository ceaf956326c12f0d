"""Reading runs and reporting on them: loading, statistics, comparisons, tables. See `results.py` and `figures.py`."""
