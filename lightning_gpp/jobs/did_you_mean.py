"""What a person may have meant whose options the console command refused.

Hydra names the option that it does not know; this adds the names that are near, and the jobs that
have such an option. It runs after the error, so that it costs nothing where there is none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import OmegaConf

OPTION = re.compile(r"([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
"""``NAME=VALUE``; what is added by ``+`` or taken away by ``~`` may have any name."""

PLUGIN = re.compile(r"Could not find 'hydra/(sweeper/optuna|launcher/joblib)'")
CUTOFF = 0.7
"""How alike a name must be to be shown, from 0 to 1."""


class Known(NamedTuple):
    """What may be said on the command line.

    Attributes:
        choices: by group.
        options: names of options, by job.
    """

    choices: Mapping[str, Collection[str]]
    options: Mapping[str, Collection[str]]


def suggestions(arguments: Sequence[str], error: str) -> list[str]:
    """What to try instead, a line each.

    Args:
        arguments: of the command line.
        error: what Hydra says of them.
    """
    if PLUGIN.search(error):
        return ['Plug-ins of Hydra are missing: pip install "lightning_gpp[sweep]"']
    given = [match.groups() for match in map(OPTION.fullmatch, arguments) if match]
    flag = re.search(r"(?:^|\n)(?:--config-dir|-cd)[=\n](.*)", "\n".join(arguments))
    try:
        known = known_names(given, flag[1] if flag else None)
    except HydraException:  # nothing composes: Hydra's own message has to do
        return []
    job = next((value for name, value in given if name == "job"), "train")
    return [line for name, value in given if (line := suggestion(name, value, job, known))]


def suggestion(name: str, value: str, job: str, known: Known) -> str | None:
    """A line about one option; None where nothing is wrong or nothing like it is known.

    >>> options = {"train": frozenset({"seed"}), "plan": frozenset({"graph"})}
    >>> known = Known({"recipe": ["dlrm"]}, options)
    >>> suggestion("recipe", "[dlrm,dlmr]", "train", known)
    'recipe=[dlrm,dlmr]: did you mean recipe=[dlrm,dlrm]?'
    >>> suggestion("sed", "1", "train", known)
    'sed=1: did you mean seed=1?'
    >>> suggestion("graph", "mmt", "train", known)
    'graph=mmt is an option of job=plan'
    """
    given, choices, mine = f"{name}={value}", known.choices.get(name), known.options.get(job, ())
    items = re.findall(r"[\w-]+", value) if choices and value != "null" else []
    if wrong := [item for item in items if item not in (choices or ())]:
        near = {item: found[0] for item in wrong if (found := _near(item, choices or ()))}
        meant = re.sub(r"[\w-]+", lambda item: near.get(item[0], item[0]), value)
        return f"{given}: did you mean {name}={meant}?" if near else None
    if name in mine or name.startswith("hydra"):
        return None
    alike = [f"{each}={value}" for each in _near(name, {*mine, *known.choices})]
    if jobs := _jobs_with(name, known):
        same = [each for each in alike if f".{name}=" in each and not choices]
        return f"{given} is an option of {jobs}" + (f"; here it is {same[0]}" if same else "")
    if choices or alike:
        return None if choices else f"{given}: did you mean {' or '.join(alike)}?"
    for other in _near(name, set().union(*known.options.values())):
        return f"{given}: did you mean {other}={value}, an option of {_jobs_with(other, known)}?"
    return None


def _jobs_with(name: str, known: Known) -> str:
    *first, last = [f"job={job}" for job, names in known.options.items() if name in names] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _near(name: str, names: Iterable[str]) -> list[str]:
    """Names like this one; of ``a.b.c`` also those that end like it."""
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=CUTOFF)
    last = [each for each in sorted(names) if each.rpartition(".")[2] == name.rpartition(".")[2]]
    return last[:3] or found


def known_names(given: Sequence[tuple[str, ...]], folder: str | None) -> Known:
    """The groups, and the options of every job with the groups that were chosen.

    Args:
        given: names and values of the command line.
        folder: of the user's own configurations.
    """
    path = [] if folder is None else [f"hydra.searchpath=[file://{folder}]"]
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        choices = {
            group: loader.get_group_options(group, ObjectType.CONFIG, "config", path)
            for group in loader.list_groups("")
        }
        chosen = [
            f"{name}={value}"
            for name, value in given
            if name != "job" and value in choices.get(name, ())
        ]
        return Known(choices, {job: _options(job, chosen, path) for job in choices["job"]})


def _options(job: str, groups: Sequence[str], path: Sequence[str]) -> frozenset[str]:
    """Names of all options of a job; groups that it does not have are left out."""
    try:
        config = compose("config", overrides=[f"job={job}", *groups, *path])
    except HydraException as error:
        kept = [item for item in groups if f"'{item.partition('=')[0]}'" not in str(error)]
        return (
            _options(job, kept if len(kept) < len(groups) else [], path) if groups else frozenset()
        )
    return frozenset(_names(OmegaConf.to_container(config, resolve=False)))


def _names(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of everything in a configuration."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _names(value, f"{prefix}{key}.")
