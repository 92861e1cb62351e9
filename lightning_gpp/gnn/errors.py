"""What cannot be trained in chunks of vertices."""


class GraphTrainingError(ValueError):
    """A graph or a model does not fit training in chunks; the text names what and the remedy."""
