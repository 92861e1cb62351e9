"""Small changes of a division: what a local search tries next.

- a border between two parts moves by a few places;
- a part gets twice or half the devices, from or to another part or idle ones;
- two neighbouring parts become one, or one becomes two;
- two neighbouring parts swap their devices, or two parts some of their places;
- all borders are balanced anew;
- a part, or all of them, takes twice or half the samples at a time, or replicas take turns where
  they shared every micro-batch, or the other way round.

In a line of parts a change of devices also balances the borders anew. A neighbour may be no valid
division (too many devices, a cycle): who makes a candidate of it finds that out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpp.planner.graphpipe.refine.borders import balanced_borders
from lightning_gpp.planner.graphpipe.refine.division import Divider, Division, in_line, tidied
from lightning_gpp.planner.graphpipe.space.crew import Crew

SHIFTS = (1, -1, 2, -2, 4, -4, 8, -8)
"""Places by which a border moves."""

MANY_PARTS = 8
"""Of more parts than these, only neighbours hand devices to each other."""

Crews = tuple[Crew, ...]


def shifted(division: Division, *_: object) -> Iterator[Division]:
    """One border moves; the part on one side may lose all its places to the other."""
    stops = division.stops
    for index, (stop, part) in enumerate(stops[:-1]):
        start = stops[index - 1][0] if index else 0
        for step in SHIFTS:
            if start <= stop + step <= stops[index + 1][0]:
                moved = *stops[:index], (stop + step, part), *stops[index + 1 :]
                yield tidied(moved, division.crews, division.microbatch_size)


def merged(division: Division, *_: object) -> Iterator[Division]:
    """Two neighbouring parts of one kind become one, on the devices of both, or of the larger."""
    pairs = {
        tuple(sorted((one, other)))
        for (_, one), (_, other) in zip(division.stops, division.stops[1:])
    }
    for one, other in sorted(pairs):
        crews = [division.crews[one], division.crews[other]]
        if crews[0].kind != crews[1].kind:
            continue
        stops = [(stop, one if part == other else part) for stop, part in division.stops]
        for crew in _joined(*crews):
            changed = *division.crews[:one], crew, *division.crews[one + 1 :]
            yield tidied(stops, changed, division.microbatch_size)


def swapped(division: Division, *_: object) -> Iterator[Division]:
    """Two pieces change places, where parts have several: ends of branches, say."""
    pieces = list(division.stops)
    for last, (stop, part) in enumerate(pieces if not division.is_line else ()):
        for first, (before, other) in enumerate(pieces[:last]):
            if part != other:
                changed = list(pieces)
                changed[first], changed[last] = (before, part), (stop, other)
                yield tidied(changed, division.crews, division.microbatch_size)


def paced(division: Division, *_: object) -> Iterator[Division]:
    """All parts, or one, take other numbers of samples at a time."""
    size, crews = division.microbatch_size, division.crews
    for other_size in (size / 2, size * 2):
        yield division._replace(microbatch_size=other_size)
    most = max(crew.num_replicas for crew in crews)
    if most > 1:
        taking_turns = tuple(crew._replace(multiple=crew.num_replicas) for crew in crews)
        sharing = tuple(crew._replace(multiple=1) for crew in crews)
        if taking_turns != crews:
            yield Division(division.stops, taking_turns, size / most)
            yield Division(division.stops, taking_turns, size)
        if sharing != crews:
            yield Division(division.stops, sharing, size * most)
            yield Division(division.stops, sharing, size)
    for number, crew in enumerate(crews):
        others = crews[:number], crews[number + 1 :]
        doubled = crew._replace(multiple=2 * crew.multiple)
        yield division._replace(crews=(*others[0], doubled, *others[1]))
        if crew.multiple % 2 == 0:
            halved = crew._replace(multiple=crew.multiple // 2)
            yield division._replace(crews=(*others[0], halved, *others[1]))
        else:  # the others take twice as many of half the size
            twice = [tuple(c._replace(multiple=2 * c.multiple) for c in part) for part in others]
            changed = *twice[0], crew, *twice[1]
            yield division._replace(crews=changed, microbatch_size=size / 2)


def staffed(division: Division, divider: Divider, at_most_s: float) -> Iterator[Division]:
    """Other devices, and borders that balance them; where parts are no line, the same borders."""
    limit_s = at_most_s / divider.problem.request.minibatch_size
    size = division.microbatch_size
    found = _other_crews(division.crews, divider.problem.available)
    for crews in dict.fromkeys(tuple(_in_whole_samples(c, size) for c in one) for one in found):
        if division.is_line:
            rates = divider.problem.prices.rates(size)
            if all(divider.may(crew, size) for crew in crews):
                sums = [rates.least_seconds(crew) for crew in crews]
                for borders in balanced_borders(sums, limit_s):
                    yield in_line(borders, crews, size)
        elif len(crews) == len(division.crews):
            yield division._replace(crews=crews)


def _in_whole_samples(crew: Crew, microbatch_size: float) -> Crew:
    """A crew that takes as many samples at a time as its replicas can share."""
    multiple = crew.multiple
    while multiple % crew.num_replicas and multiple * microbatch_size % crew.num_replicas:
        multiple *= 2
    return crew._replace(multiple=multiple)


def _other_crews(crews: Crews, available: Sequence[int]) -> Iterator[Crews]:
    """Crews of parts in a row with one change, or one that frees devices and one that takes them.

    The first are the same, as only their borders may be out of balance. Yields only what there are
    enough devices for.
    """
    yield crews
    everywhere = range(len(crews))
    for number in everywhere:
        for changed in (*_keeping(crews, number), *_taking(crews, number)):
            if _fits(changed, available):
                yield changed
    for number in everywhere:
        for fewer in _freeing(crews, number):
            yield fewer
            near = everywhere if len(crews) <= MANY_PARTS else range(number - 1, number + 2)
            for other in set(near).intersection(range(len(fewer))):
                for changed in _taking(fewer, other):
                    if _fits(changed, available):
                        yield changed


def _keeping(crews: Crews, number: int) -> Iterator[Crews]:
    """A part becomes two, it and the next one become one, or swap, with as many devices."""
    before, crew, behind = crews[:number], crews[number], crews[number + 1 :]
    if crew.num_replicas > 1:
        half = _sized(crew, crew.num_replicas // 2)
        yield (*before, half, half, *behind)
    if behind and behind[0] != crew:
        yield (*before, behind[0], crew, *behind[1:])
    if behind and behind[0][:2] == crew[:2]:
        both = _sized(max(crew, behind[0]), 2 * crew.num_replicas)
        yield (*before, both, *behind[1:])


def _taking(crews: Crews, number: int) -> Iterator[Crews]:
    """A part gets twice the devices, or becomes two with as many each."""
    before, crew, behind = crews[:number], crews[number], crews[number + 1 :]
    yield (*before, _sized(crew, 2 * crew.num_replicas), *behind)
    yield (*before, crew, crew, *behind)


def _freeing(crews: Crews, number: int) -> Iterator[Crews]:
    """A part gets half the devices, or its work goes to others."""
    before, crew, behind = crews[:number], crews[number], crews[number + 1 :]
    if crew.num_replicas > 1:
        yield (*before, _sized(crew, crew.num_replicas // 2), *behind)
    if before or behind:
        yield (*before, *behind)


def _sized(crew: Crew, num_replicas: int) -> Crew:
    """A crew with other devices; one that took turns does so still."""
    takes_turns = crew.multiple == crew.num_replicas
    return crew._replace(
        num_replicas=num_replicas, multiple=num_replicas if takes_turns else crew.multiple
    )


def _joined(one: Crew, other: Crew) -> Iterator[Crew]:
    """Crews of two parts that become one."""
    larger = max(one, other)
    yield larger
    if one.num_replicas == other.num_replicas:
        yield _sized(larger, 2 * larger.num_replicas)


def _fits(crews: Crews, available: Sequence[int]) -> bool:
    used = [0] * len(available)
    for crew in crews:
        used[crew.kind] += crew.num_replicas
    return all(count <= most for count, most in zip(used, available))
