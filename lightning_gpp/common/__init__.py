"""Helpers that every room may import; none knows of models or pipelines."""
