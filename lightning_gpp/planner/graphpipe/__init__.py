"""The planner ``graphpipe`` and its restrictions: stages that form a graph.

GraphPipe (arXiv 2406.17145, ASPLOS 2025), section 5, and beyond it plans whose stages share
devices. In the order of reading:

- ``depth_first``, ``unit_tables``: the units in an order in which branches stay together, and what
  sets of them are; ``draft``, ``drafted``: a plan as sets of units on devices;
- ``homes``, ``own_homes``: the devices that stages may go to, shared or their own;
- ``lines``: the units in a line, divided among groups of devices; ``deals``: plans to begin with;
- ``cuts``, ``moves``, ``redealt``: the drafts next to one; ``arrange``: in an order in which stages
  may be numbered;
- ``least``: a lower bound of a draft's step, ``judged``: its step, within a budget;
- ``climb``: the search; ``fewer``: fewer stages at its end; ``by_speed``: unequal shares;
- ``planner``: the planners; ``result``: what they found; ``infeasible``: what would help where
  nothing fits.
"""

from lightning_gpp.planner.graphpipe.result import RankedPlan, SearchResult

__all__ = ["RankedPlan", "SearchResult"]
