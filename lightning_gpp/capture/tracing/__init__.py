"""Traces a forward into a graph, and decides what stays whole in it."""
