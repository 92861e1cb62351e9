"""Measures the costs of operators."""
