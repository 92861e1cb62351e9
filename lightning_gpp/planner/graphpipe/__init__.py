"""The planners ``graphpipe`` and ``graphpipe_exclusive``: stages that form a graph.

GraphPipe (arXiv 2406.17145, ASPLOS 2025), section 5. In the order of reading:

``place``: plans as units on groups of devices, a judge of them, and a climb to better ones.

``problem``: the model as a line of units. ``space``: what may be chosen.

- ``rates`` (with ``contents``, ``holdings``, ``flows``): what a stage takes, and how many
  micro-batches it can hold; ``load``: what all units take at least;
- ``space``: what may be chosen with one smallest micro-batch.

``divide``: all divisions of a space that are fast enough.

- ``partition`` (with ``frontier``, ``limit``): the dynamic program for one limit.

``choose``: the best divisions.

- ``limits``: the binary search on the limit; ``found_stage``: what it finds, on devices;
- ``choice`` (with ``least``): the spaces that are worth looking at, shown to the judge;
- ``result``: the best plan and the next ones; ``infeasible``: what would help where nothing fits.

``planner`` is ``graphpipe_exclusive``: the best divisions, and a climb among plans whose stages
own their devices. ``place.planner`` is ``graphpipe``: beyond the paper, a climb among plans whose
stages share devices, from the best of the former and those of other planners.
"""

from lightning_gpp.planner.graphpipe.choose.result import RankedPlan, SearchResult

__all__ = ["RankedPlan", "SearchResult"]
