"""Running a sweep by Ray Tune: search space, constraints, room, plan, log, command line. Its data is `sweep.py`."""
