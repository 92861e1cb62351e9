"""The planner ``graphpipe``: stages of a model graph whose branches run in parallel.

GraphPipe (arXiv 2406.17145, ASPLOS 2025), section 5. In the order of reading:

``problem``: the model as units, and the micro-batch sizes and devices.

``space``: what may be chosen.

- ``layout`` (with ``collapse``): the model's series-parallel tree as runs and blocks; ``frames``:
  where a stage may end;
- ``rates`` (with ``contents``, ``holdings``, ``flows``): what a stage takes, and how many
  micro-batches it can hold;
- ``space``: what may be chosen with one smallest micro-batch.

``divide``: all divisions of a space that are fast enough.

- ``partition`` (with ``frontier``, ``limit``): the dynamic program for one limit;
- ``siblings``: the branches beside the one that it follows;
- ``joins``: stages that take branches in.

``candidates``: found stages as plans.

- ``placement``, ``search``: devices, and candidates with what their steps take at least.

``choose``: the best of all.

- ``limits``: the binary search on the limit;
- ``choice`` (with ``least``): the spaces that are worth looking at, and the best by its step;
- ``result``: what became of the others;
- ``infeasible``: what would help where nothing fits.

``place``: a climb from the best plans to better ones. ``planner``, which is
``graphpipe_exclusive``, climbs among plans whose stages own their devices; ``place.planner``, which
is ``graphpipe``, goes beyond the paper, among plans whose stages share them: from the best plan of
the former and those of other planners.
"""

from lightning_gpp.planner.graphpipe.choose.result import RankedPlan, SearchResult

__all__ = ["RankedPlan", "SearchResult"]
