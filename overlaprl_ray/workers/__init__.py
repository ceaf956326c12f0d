"""A run's three workers without Ray: generator, reference, learner."""
