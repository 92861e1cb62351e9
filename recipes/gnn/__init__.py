"""Graph neural networks, on many small graphs or on one.

Many small graphs have one label or one number each; micro-batches are of whole graphs (``motifs``,
``tu_files``, ``model``). Of one graph the vertices have labels, and it is trained on as a whole or
in chunks of its vertices (``full_graph``, ``published_graphs``, ``node_model``).
"""

from .data import GraphData, GraphDataset
from .default_data import gnn_data
from .full_graph import BlockModel, FullGraphData, Planetoid
from .model import GraphNetwork
from .motifs import Motifs
from .node_model import NodeNetwork, network_for
from .published_graphs import Coauthor, Flickr, Reddit, Squirrel
from .tu_files import TUFiles

__all__ = [
    "BlockModel",
    "Coauthor",
    "Flickr",
    "FullGraphData",
    "GraphData",
    "GraphDataset",
    "GraphNetwork",
    "Motifs",
    "NodeNetwork",
    "Planetoid",
    "Reddit",
    "Squirrel",
    "TUFiles",
    "gnn_data",
    "network_for",
]
