"""The model as data: operators, the values between them, and the graph of stages."""

from lightning_gpp.graph.json_form import graph_from_json, graph_to_json
from lightning_gpp.graph.model_graph import (
    GraphInput,
    ModelGraph,
    OpNode,
    Parameter,
    Value,
    Variation,
)
from lightning_gpp.graph.stage_graph import (
    FEED,
    StageEdge,
    StageGraph,
    stage_depths,
    stage_graph,
)
from lightning_gpp.graph.tensor_spec import TensorSpec

__all__ = [
    "FEED",
    "GraphInput",
    "ModelGraph",
    "OpNode",
    "Parameter",
    "StageEdge",
    "StageGraph",
    "TensorSpec",
    "Value",
    "Variation",
    "graph_from_json",
    "graph_to_json",
    "stage_depths",
    "stage_graph",
]
