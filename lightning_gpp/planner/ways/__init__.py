"""Plans for models whose vertices are divided over ways: pipeline, graph parallelism, or both."""
