"""Full-graph training in chunks of vertices: partition, histories, stages that run one chunk.

After GNNPipe (arXiv 2308.10087): layers are divided over devices, chunks of vertices go through
them as micro-batches do, and what a layer reads of vertices that were not computed yet comes from a
history. Everything here is arithmetic on tensors of one rank.
"""

from lightning_gpp.gnn.check import check_in_chunks as check_in_chunks
from lightning_gpp.gnn.check import chunk_costs as chunk_costs
from lightning_gpp.gnn.chunked_model import ChunkedModel as ChunkedModel
from lightning_gpp.gnn.chunks import Chunks as Chunks
from lightning_gpp.gnn.chunks import GraphTrainingError as GraphTrainingError
from lightning_gpp.gnn.history import Techniques as Techniques
from lightning_gpp.gnn.message_passing import mixing_methods as mixing_methods
from lightning_gpp.gnn.message_passing import without_caches as without_caches
from lightning_gpp.gnn.partition import check_edges as check_edges
from lightning_gpp.gnn.partition import partition as partition
from lightning_gpp.gnn.partition import small_graph as small_graph
