"""PipeDream's partitioning of a line of layers (SOSP 2019)."""

from lightning_gpp.planner.pipedream.planner import pipedream

__all__ = ["pipedream"]
