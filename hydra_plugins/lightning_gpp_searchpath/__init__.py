"""Shows lightning_gpp's configuration groups to every other Hydra application.

Hydra imports this at the start of each of its applications in the environment, so it is small and
imports neither torch nor lightning_gpp. The groups appear below ``lightning_gpp/``:

.. code-block:: yaml

    defaults:
      - lightning_gpp/recipe@recipe: multimodal
      - lightning_gpp/data@data: multimodal
      - lightning_gpp/trainer@trainer: cpu
      - lightning_gpp/strategy@strategy: graphpipe

Their own names (``data``, ``trainer``, ``experiment`` ...) are everybody's: appended without the
prefix, a choice that is missing in an application would be ours without a word. An application
that wants the short names asks for them: ``hydra.searchpath: [pkg://lightning_gpp.configs]``; its
own files then win one by one.

A ``hydra_plugins`` folder has no ``__init__.py``: it is a namespace that distributions share.
"""

from __future__ import annotations

import os

from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

PREFIX = "lightning_gpp"
PACKAGE = "lightning_gpp.configs"


def processes(most: int) -> int:
    """Processes for the cores that this one may use: at least two, so that there is a pipeline."""
    affinity = getattr(os, "sched_getaffinity", None)
    return max(2, min(most, len(affinity(0)) if affinity else os.cpu_count() or 1))


OmegaConf.register_new_resolver(f"{PREFIX}.processes", processes, replace=True)


class LightningGppSearchPath(SearchPathPlugin):
    """Appends the groups to the search path of an application that does not have them."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra with the search path of the application that starts."""
        if not any(element.path == f"pkg://{PACKAGE}" for element in search_path.get_path()):
            search_path.append(PREFIX, f"{PrefixedSource.scheme()}://{PACKAGE}")


class PrefixedSource(ConfigSource):
    """The configurations of a package, seen below the group :data:`PREFIX`."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._source = ImportlibResourcesConfigSource(provider, f"pkg://{self.path}")

    @staticmethod
    def scheme() -> str:
        """Beginning of the source's place in a search path."""
        return "lightning-gpp"

    def available(self) -> bool:
        """Whether the package is there."""
        return self._source.available()

    def load_config(self, config_path: str) -> ConfigResult:
        """The configuration at a path that begins with the prefix.

        Raises:
            ConfigLoadError: the path does not.
        """
        inside = _inside(config_path)
        if inside is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        return self._source.load_config(inside)

    def is_group(self, config_path: str) -> bool:
        """Whether a path is a group."""
        inside = _inside(config_path)
        return config_path == "" or (inside is not None and self._source.is_group(inside))

    def is_config(self, config_path: str) -> bool:
        """Whether a path is a configuration."""
        inside = _inside(config_path)
        return bool(inside) and self._source.is_config(str(inside))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names of the groups and configurations in a group, sorted."""
        inside = _inside(config_path)
        if inside is not None:
            return self._source.list(inside, results_filter)
        return [] if results_filter == ObjectType.CONFIG else [PREFIX]


def _inside(config_path: str) -> str | None:
    """``recipe/multimodal`` of ``lightning_gpp/recipe/multimodal``; None outside the prefix."""
    first, _, rest = config_path.partition("/")
    return rest if first == PREFIX else None
