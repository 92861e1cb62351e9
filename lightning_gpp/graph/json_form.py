"""The versioned JSON form of a model graph."""

from __future__ import annotations

from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.graph.model_graph import ModelGraph

FORMAT = JsonFormat("lightning_gpp.model_graph", version=2, older=(1,))


def graph_to_json(graph: ModelGraph) -> str:
    """The graph as a JSON document.

    >>> graph = ModelGraph(inputs=(), operators=(), outputs=())
    >>> graph_from_json(graph_to_json(graph)) == graph
    True
    """
    return FORMAT.dumps(graph)


def graph_from_json(text: str, *, source: str = "model graph") -> ModelGraph:
    """Reads :func:`graph_to_json`'s form.

    Args:
        text: the document.
        source: where it comes from, for error messages.

    Raises:
        ValueError: it is not a model graph; the text names the place.
    """
    return FORMAT.loads(ModelGraph, text, source=source)
