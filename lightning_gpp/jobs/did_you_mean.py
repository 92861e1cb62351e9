"""What a person may have meant whose options the console command refused.

Hydra names the option that it does not know, or what a group has; this adds the options that are
near, and the jobs that have such an option. It runs after the error, so that it costs nothing where
there is none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import OmegaConf

OPTION = re.compile(r"([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
"""``NAME=VALUE``; what is added by ``+`` or taken away by ``~`` may have any name."""

PLUGIN = re.compile(r"Could not find 'hydra/(sweeper/optuna|launcher/joblib)'")

Known = Mapping[str, Collection[str]]
"""Names of options, by job."""


def suggestions(arguments: Sequence[str], error: str) -> list[str]:
    """What to try instead, a line each.

    Args:
        arguments: of the command line.
        error: what Hydra says of them.
    """
    if PLUGIN.search(error):
        return ['Plug-ins of Hydra are missing: pip install "lightning_gpp[sweep]"']
    given = dict(match.groups() for match in map(OPTION.fullmatch, arguments) if match)
    flag = re.search(r"(?:^|\n)(?:--config-dir|-cd)[=\n](.*)", "\n".join(arguments))
    try:
        known = known_options(given, flag[1] if flag else None)
    except HydraException:  # nothing composes: Hydra's own message has to do
        return []
    job = given.get("job", "train")
    return [line for name, value in given.items() if (line := suggestion(name, value, job, known))]


def suggestion(name: str, value: str, job: str, known: Known) -> str | None:
    """A line about one option; None where it is known or nothing like it is.

    >>> known = {"train": {"seed"}, "plan": {"graph"}}
    >>> suggestion("sed", "1", "train", known)
    'sed=1: did you mean seed=1?'
    >>> suggestion("graph", "mmt", "train", known)
    'graph=mmt is an option of job=plan'
    """
    mine = sorted(known.get(job, ()))
    if name in mine or name.startswith("hydra"):
        return None
    if jobs := [f"job={other}" for other, names in known.items() if name in names]:
        return f"{name}={value} is an option of {', '.join(jobs)}"
    last = [each for each in mine if each.rpartition(".")[2] == name.rpartition(".")[2]]
    alike = last[:3] or difflib.get_close_matches(name, mine, n=1, cutoff=0.7)
    meant = " or ".join(f"{each}={value}" for each in alike)
    return f"{name}={value}: did you mean {meant}?" if alike else None


def known_options(given: Mapping[str, str], folder: str | None) -> dict[str, set[str]]:
    """The options of every job with the groups that were chosen, and the other groups.

    Args:
        given: names and values of the command line.
        folder: of the user's own configurations.
    """
    path = [] if folder is None else [f"hydra.searchpath=[file://{folder}]"]
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()

        def choices(group: str) -> list[str]:
            return loader.get_group_options(group, ObjectType.CONFIG, "config", path)

        groups = loader.list_groups("")
        chosen = [f"{n}={v}" for n, v in given.items() if n in groups and v in choices(n)]
        chosen = [option for option in chosen if not option.startswith("job=")]
        found = {job: _options(job, chosen, path) for job in choices("job")}
    others = {*groups} - set[str]().union(*found.values())
    return {job: names | others for job, names in found.items()}


def _options(job: str, groups: Sequence[str], path: Sequence[str]) -> set[str]:
    """Names of all options of a job; without the groups where it does not have one of them."""
    for overrides in ([f"job={job}", *groups, *path], [f"job={job}", *path]):
        try:
            config = compose("config", overrides=overrides)
        except HydraException:
            continue
        return {*_names(OmegaConf.to_container(config, resolve=False))}
    return set()


def _names(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of everything in a configuration."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _names(value, f"{prefix}{key}.")
