"""What runs a run: the serial replay, and the same on Ray with recovery."""
