"""The versioned JSON form of a cluster."""

from __future__ import annotations

from lightning_gpp.cluster.cluster import Cluster
from lightning_gpp.strict_json import JsonFormat

FORMAT = JsonFormat("lightning_gpp.cluster", version=1)


def cluster_to_json(cluster: Cluster) -> str:
    """The cluster as a JSON document.

    >>> from lightning_gpp.cluster.cluster import uniform_cluster
    >>> cluster_from_json(cluster_to_json(uniform_cluster(2))) == uniform_cluster(2)
    True
    """
    return FORMAT.dumps(cluster)


def cluster_from_json(text: str, *, source: str = "cluster") -> Cluster:
    """Reads :func:`cluster_to_json`'s form.

    Args:
        text: the document.
        source: where it comes from, for error messages.

    Raises:
        ValueError: it is not a cluster; the text names the place.
    """
    return FORMAT.loads(Cluster, text, source=source)
