"""Builds the question to planners from a workload, a file or a recipe."""
