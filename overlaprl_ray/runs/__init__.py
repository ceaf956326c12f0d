"""A run's folder and what is written into it, or said about it elsewhere."""
