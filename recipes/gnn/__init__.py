"""Graph neural networks on batches of small graphs: one label or one number per graph.

Two modes belong to this family. Here is the first: many small graphs, micro-batches of whole
graphs (``motifs``, ``tu_files``, ``model``). The second, node-level training on the chunks of one
full graph with historical embeddings, gets files of its own beside these.
"""

from .data import GraphData, GraphDataset
from .default_data import gnn_data
from .model import GraphNetwork
from .motifs import Motifs
from .tu_files import TUFiles

__all__ = ["GraphData", "GraphDataset", "GraphNetwork", "Motifs", "TUFiles", "gnn_data"]
