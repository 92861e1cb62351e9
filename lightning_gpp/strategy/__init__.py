"""The Lightning glue: the strategy and its registration."""

from lightning_gpp.strategy.graphpipe import START_METHODS, GraphPipeStrategy

__all__ = ["START_METHODS", "GraphPipeStrategy"]
