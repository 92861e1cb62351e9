"""Full-graph training in chunks of vertices: partition, histories, and stages that run one chunk.

After GNNPipe (arXiv 2308.10087): layers are divided over devices, chunks of vertices go through
them as micro-batches do, and what a layer reads of vertices that were not computed yet comes from a
history. Everything here is arithmetic on tensors of one rank.
"""

from lightning_gpp.gnn.check import check_in_chunks
from lightning_gpp.gnn.chunk_costs import chunk_costs
from lightning_gpp.gnn.chunked_model import ChunkedModel
from lightning_gpp.gnn.chunks import Chunks
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.history import Techniques
from lightning_gpp.gnn.message_passing import mixing_methods, without_caches
from lightning_gpp.gnn.partition import check_edges, partition
from lightning_gpp.gnn.small_graph import small_graph

__all__ = [
    "ChunkedModel",
    "Chunks",
    "GraphTrainingError",
    "Techniques",
    "check_edges",
    "check_in_chunks",
    "chunk_costs",
    "mixing_methods",
    "partition",
    "small_graph",
    "without_caches",
]
