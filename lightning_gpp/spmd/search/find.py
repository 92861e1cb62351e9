"""The cheapest program for given shares."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.blocks import BlockSearch
from lightning_gpp.spmd.search.build import ProgramBuilder
from lightning_gpp.spmd.search.labels import Effort, Label, LabelSearch, TooManyLabelsError
from lightning_gpp.spmd.search.limits import Allowed
from lightning_gpp.spmd.search.steps import StepBuilder
from lightning_gpp.units_of_measure import bytes_text

MOST_EXPANSIONS = 200_000
"""Some minutes in Python; the searches of the published models take some hundreds or thousands."""


MOST_LABELS = 600
"""The published models have up to 600 at a position; a model with a dozen towers has thousands, as
each may lie in one of several ways until they are joined, and a search takes minutes."""

BEAM = 100
"""A second for a dozen towers. Where it was compared with an exact search it was up to 10 % off."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search is done.

    Attributes:
        limits_memory: whether every device's memory has to be enough.
        most_expansions: after which it gives up.
        most_labels: at one position in an exact search. Where there are more, another search
            continues only ``beam`` of them, the cheapest first: its program may not be the
            cheapest, and ``least_s`` of what is found says how far from it at most.
        beam: see ``most_labels``.
        allowed: what it is limited to.
        memory_price: seconds that a byte left on a device counts for, per device; empty for
            nothing. The seconds found have them in.
        name: of the program.
    """

    limits_memory: bool = False
    most_expansions: int = MOST_EXPANSIONS
    most_labels: int = MOST_LABELS
    beam: int = BEAM
    allowed: Allowed = field(default_factory=Allowed)
    memory_price: tuple[float, ...] = ()
    name: str = "hap"


@dataclass(frozen=True, slots=True)
class FoundProgram:
    """What a search found.

    Attributes:
        program: the cheapest program.
        seconds: what it costs.
        least_s: no program costs less; less than ``seconds`` only where labels were dropped.
        effort: how much was searched.
    """

    program: SpmdProgram
    seconds: float
    least_s: float
    effort: Effort


class NoProgramFitsError(ValueError):
    """Every program needs more memory than some device has."""


def find_program(
    graph: SpmdGraph,
    machine: Machine,
    shares: tuple[float, ...],
    options: SearchOptions | None = None,
    theory: Theory | None = None,
) -> FoundProgram:
    """The cheapest program of the theory, by the judge's prices.

    Args:
        graph: the model.
        machine: the devices.
        shares: of the devices.
        options: how it is searched.
        theory: of the graph, where it has been made before.

    Raises:
        NoProgramFitsError: no program fits the memory.
        TooManyExpansionsError: the limit ended the search.
    """
    options = options or SearchOptions()
    theory = theory or Theory(graph, machine.num_devices)
    memory_price = np.array(options.memory_price) if options.memory_price else None
    prices = PriceList(graph, machine, shares, memory_price)
    classes = _classes(machine, shares) if options.limits_memory else ()
    builder = StepBuilder(theory, prices, options.allowed, classes)
    steps = builder.steps()
    limit = tuple(float(machine.memory_bytes[device]) for device in classes)

    def searched(effort: Effort) -> tuple[LabelSearch, list[Label]]:
        memory_limit = limit if options.limits_memory else None
        search = LabelSearch(steps, builder.tables, effort, memory_limit)
        none = (0.0,) * len(classes)
        start = Label(0.0, none, 0, (0,) * (len(steps[0].live) if steps else 0))
        return search, BlockSearch(search, none).best(start)

    effort = Effort(options.most_expansions, most_labels=options.most_labels, drops_labels=False)
    try:
        search, found = searched(effort)
    except TooManyLabelsError:
        effort = Effort(options.most_expansions, effort.expansions, effort.made, options.beam)
        search, found = searched(effort)
    if not found:
        raise NoProgramFitsError(f"no program fits {[bytes_text(most) for most in limit]}")
    program = ProgramBuilder(graph, prices, builder.tables).program(
        steps, found[0].choices(), options.name
    )
    return FoundProgram(
        program,
        found[0].seconds,
        search.remaining_s[0] if effort.dropped else found[0].seconds,
        effort,
    )


def _classes(machine: Machine, shares: tuple[float, ...]) -> tuple[int, ...]:
    """The first device of every class with the same shares and memory.

    Of devices with equal shares the first gets the most units.
    """
    found: dict[tuple[float, float], int] = {}
    for device in range(machine.num_devices):
        found.setdefault((shares[device], float(machine.memory_bytes[device])), device)
    return tuple(found.values())
