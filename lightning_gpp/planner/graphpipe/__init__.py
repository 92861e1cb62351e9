"""The planners ``graphpipe``, ``graphpipe_exclusive`` and ``sequential``.

GraphPipe (arXiv 2406.17145, ASPLOS 2025), section 5. In the order of reading:

- ``draft``: the units in an order in which branches stay together, what sets of them are, and a
  plan as such sets on groups of devices;
- ``homes``: the devices that stages may go to; ``deals``: drafts without any search; ``line``: the
  best chains; ``moves``: the drafts next to one;
- ``bounds``: a lower bound of a draft's step; ``judge``: its step, within a budget; ``climb``: the
  local search; ``planner``: the planners.
"""
