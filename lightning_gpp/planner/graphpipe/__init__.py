"""The planner ``graphpipe``: stages of a model graph whose branches run in parallel.

GraphPipe (arXiv 2406.17145, ASPLOS 2025), section 5. In the order of reading:

- ``problem`` (with ``collapse``): the model as units, and the micro-batch sizes and devices;
- ``layout``: its series-parallel tree as runs and blocks, and where a stage may end;
- ``rates`` (with ``contents``, ``holdings``, ``flows``): what a stage takes, and how many
  micro-batches it can hold;
- ``space``: what may be chosen with one smallest micro-batch;
- ``partition`` (with ``frontier``, ``usage``): the dynamic program for one limit;
- ``siblings`` (with ``packings``, ``packing``, ``branches``): the branches beside the one that it
  follows;
- ``joins`` (with ``tails``): stages that take branches in;
- ``limits``: the binary search on the limit;
- ``look`` (with ``least``): what is worth looking at with one micro-batch size;
- ``placement``, ``search``: devices, and candidates;
- ``estimate`` (with ``chains``): what the step of a candidate takes at least;
- ``result``: the choice by the time of the whole step;
- ``polish``: single units that the slowest stage of the best plan hands over;
- ``infeasible``: what would help where nothing fits.
"""

from lightning_gpp.planner.graphpipe.planner import graphpipe, search_plans
from lightning_gpp.planner.graphpipe.result import RankedPlan, SearchResult

__all__ = ["RankedPlan", "SearchResult", "graphpipe", "search_plans"]
