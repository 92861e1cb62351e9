"""What a person may have meant whose options the console command refused.

Hydra names the option that it does not know; this adds the names that are near, and the jobs that
have such an option. It runs after the error, so that it costs nothing where there is none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

CONFIGS = "lightning_gpp.configs"
OPTION = re.compile(r"([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
"""``NAME=VALUE``; what is added by ``+`` or taken away by ``~`` may have any name."""

EXTRAS = {"hydra/sweeper/optuna": "sweep", "hydra/launcher/joblib": "sweep"}
"""Plug-ins that a choice needs, and the extra that installs them."""

CUTOFF = 0.7
"""How alike a name must be to be shown, from 0 to 1."""


@dataclass(frozen=True)
class Known:
    """What may be said on the command line.

    Attributes:
        choices: by group.
        options: names of options, by job.
    """

    choices: Mapping[str, Sequence[str]]
    options: Mapping[str, frozenset[str]]


def suggestions(arguments: Sequence[str], error: str) -> list[str]:
    """What to try instead, a line each.

    Args:
        arguments: of the command line.
        error: what Hydra says of them.
    """
    missing = [extra for plugin, extra in EXTRAS.items() if f"Could not find '{plugin}'" in error]
    if missing:
        return [f'Plug-ins of Hydra are missing: pip install "lightning_gpp[{missing[0]}]"']
    given = [match.groups() for match in map(OPTION.fullmatch, arguments) if match]
    try:
        known = known_names(given, config_dir(arguments))
    except HydraException:  # nothing composes: Hydra's own message has to do
        return []
    job = next((value for name, value in given if name == "job"), "train")
    lines = [suggestion(name, value, job, known) for name, value in given]
    return [line for line in lines if line]


def suggestion(name: str, value: str, job: str, known: Known) -> str | None:
    """A line about one option; None where nothing is wrong or nothing like it is known.

    >>> options = {"train": frozenset({"seed"}), "plan": frozenset({"graph"})}
    >>> known = Known({"recipe": ["dlrm"]}, options)
    >>> suggestion("recipe", "dlmr", "train", known)
    'recipe=dlmr: did you mean recipe=dlrm?'
    >>> suggestion("recipe", "[dlrm,dlmr]", "train", known)
    'recipe=[dlrm,dlmr]: did you mean recipe=[dlrm,dlrm]?'
    >>> suggestion("sed", "1", "train", known)
    'sed=1: did you mean seed=1?'
    >>> suggestion("graph", "mmt", "train", known)
    'graph=mmt is an option of job=plan'
    """
    if name in known.choices:
        return _choice(name, value, job, known)
    mine = known.options.get(job, frozenset())
    if name in mine or name.startswith("hydra"):
        return None
    near = [f"{each}={value}" for each in _near(name, {*mine, *known.choices})]
    if jobs := _jobs_with(name, known):
        same = [each for each in near if each.endswith(f".{name}={value}")]
        return f"{name}={value} is an option of {_listed(jobs)}" + (
            f"; here it is {_listed(same, 'or')}" if same else ""
        )
    if near:
        return f"{name}={value}: did you mean {_listed(near, 'or')}?"
    others = _near(name, set().union(*known.options.values()))
    if not others:
        return None
    jobs = _jobs_with(others[0], known)
    return f"{name}={value}: did you mean {others[0]}={value}, an option of {_listed(jobs)}?"


def _choice(group: str, value: str, job: str, known: Known) -> str | None:
    wrong = [item for item in re.findall(r"[\w-]+", value) if item not in known.choices[group]]
    if wrong and value != "null":
        near = {item: found[0] for item in wrong if (found := _near(item, known.choices[group]))}
        meant = re.sub(r"[\w-]+", lambda item: near.get(item[0], item[0]), value)
        return f"{group}={value}: did you mean {group}={meant}?" if near else None
    if group in known.options.get(job, ()):
        return None
    jobs = _jobs_with(group, known)
    return f"{group}={value} is an option of {_listed(jobs)}" if jobs else None


def _jobs_with(name: str, known: Known) -> list[str]:
    return [f"job={job}" for job, names in known.options.items() if name in names]


def _near(name: str, names: Iterable[str]) -> list[str]:
    """Names like this one; of ``a.b.c`` also those that end like it."""
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=CUTOFF)
    last = [each for each in sorted(names) if each.rpartition(".")[2] == name.rpartition(".")[2]]
    return last[:3] or found


def _listed(items: Sequence[str], word: str = "and") -> str:
    *first, last = items
    return f"{', '.join(first)} {word} {last}" if first else last


def config_dir(arguments: Sequence[str]) -> str | None:
    """The folder of the user's own configurations, as ``--config-dir`` names it.

    >>> config_dir(["--config-dir", "conf", "recipe=mine"]), config_dir(["seed=1"])
    ('conf', None)
    """
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            return value or next(iter(arguments[index + 1 :]), None)
    return None


def known_names(given: Sequence[tuple[str, ...]], folder: str | None) -> Known:
    """The groups, and the options of every job with the groups that were chosen.

    Args:
        given: names and values of the command line.
        folder: of the user's own configurations.
    """
    path = [] if folder is None else [f"hydra.searchpath=[file://{folder}]"]
    with initialize_config_module(CONFIGS, version_base="1.3"):
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
        return Known(choices, {job: _options(job, chosen, path, loader) for job in choices["job"]})


def _options(
    job: str, chosen: Sequence[str], path: Sequence[str], loader: ConfigLoader
) -> frozenset[str]:
    """Names of all options of a job; groups that it does not have are left out."""
    config: DictConfig | None = None
    for groups in (list(chosen), []):
        while config is None:
            try:
                config = compose("config", overrides=[f"job={job}", *groups, *path])
            except HydraException as error:
                wrong = [item for item in groups if f"'{item.partition('=')[0]}'" in str(error)]
                if not wrong:
                    break
                groups = [item for item in groups if item not in wrong]
    return frozenset() if config is None else frozenset(_names(config))


def _names(config: DictConfig) -> set[str]:
    """Dotted names of a configuration and of everything in it."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    names: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items() if isinstance(node, dict) else ():
            names.add(f"{prefix}{key}")
            walk(value, f"{prefix}{key}.")

    walk(plain, "")
    return names
