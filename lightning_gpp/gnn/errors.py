"""What cannot be trained in chunks of vertices."""

REMEDY = (
    "give GNNPipeStrategy(mode='exact', ways=1), which runs every layer on the whole graph, or use "
    "another layer (LayerNorm in the place of BatchNorm or GraphNorm)"
)
"""What to do about a layer that computes something else on chunks of vertices."""


class GraphTrainingError(ValueError):
    """A graph or a model does not fit training in chunks; the text names what and the remedy."""
