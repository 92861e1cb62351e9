"""The model as data: operators, the values between them, and the graph of stages."""

from lightning_gpp.graph.model_graph import GraphInput as GraphInput
from lightning_gpp.graph.model_graph import ModelGraph as ModelGraph
from lightning_gpp.graph.model_graph import OpNode as OpNode
from lightning_gpp.graph.model_graph import Parameter as Parameter
from lightning_gpp.graph.model_graph import Value as Value
from lightning_gpp.graph.model_graph import Variation as Variation
from lightning_gpp.graph.model_graph import graph_to_json as graph_to_json
from lightning_gpp.graph.stage_graph import FEED as FEED
from lightning_gpp.graph.stage_graph import StageEdge as StageEdge
from lightning_gpp.graph.stage_graph import StageGraph as StageGraph
from lightning_gpp.graph.stage_graph import stage_graph as stage_graph
from lightning_gpp.graph.tensor_spec import TensorSpec as TensorSpec
