"""Clusters as versioned JSON or YAML documents.

A document is a cluster (``"format": "lightning_gpp.cluster"``, every device listed) or, shorter to
write, a layout (``"format": "lightning_gpp.cluster_layout"``, groups of equal hosts).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_gpp.cluster.cluster import Cluster
from lightning_gpp.cluster.layout import ClusterLayout
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.data_file import read_data_file
from lightning_gpp.common.strict_json import JsonFormat, JsonFormError

FORMAT = JsonFormat("lightning_gpp.cluster", version=2, older=(1,))
LAYOUT_FORMAT = JsonFormat("lightning_gpp.cluster_layout", version=1)


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


def load_cluster(path: str | Path, num_devices: int | None = None) -> Cluster:
    """Reads a cluster file: a cluster or a layout, in JSON (``.json``) or YAML.

    Args:
        path: the file.
        num_devices: takes the first devices only; all that the file has if not given.

    Raises:
        ValueError: the file is not of that form; the text names it, the key, and what was
            expected. Or it has fewer devices than asked for.
        FileNotFoundError: there is no such file.
    """
    data = read_data_file(path)
    form = data.get("format") if isinstance(data, Mapping) else None
    if form == LAYOUT_FORMAT.name:
        layout = LAYOUT_FORMAT.from_data(ClusterLayout, data, source=str(path))
        try:
            return layout.cluster(num_devices)
        except ValueError as error:
            raise JsonFormError(f"{path}: {error}") from error
    if form != FORMAT.name:
        raise JsonFormError(
            f'{path}: expected "format": "{FORMAT.name}" (every device listed) or '
            f'"{LAYOUT_FORMAT.name}" (groups of hosts), got {form!r}'
        )
    return _first_devices(FORMAT.from_data(Cluster, data, source=str(path)), num_devices, path)


def _first_devices(cluster: Cluster, num_devices: int | None, path: str | Path) -> Cluster:
    if num_devices is None:
        return cluster
    check_whole("num_devices", num_devices)
    if num_devices > cluster.num_devices:
        raise JsonFormError(
            f"{path}: the cluster has {cluster.num_devices} devices, {num_devices} were asked for"
        )
    return cluster.first(num_devices)
