"""Plays a compiled program in the order of time.

Streams run ahead on their own clocks until they have to wait; transfers are served in the order in
which they become ready. That is safe: whatever a stream does after waiting for a transfer is later
than when the transfer was ready, so when the earliest ready transfer is served, no earlier one can
still come. A transfer keeps its channels from its start to its end and starts when all of them
have served those that were ready before it (first come, first served; ties in the order of the
program). Nothing overtakes, so a transfer that waits for one of its channels holds up later ones
on the others.

The pace is some microseconds per operation, which is why :func:`play` is one long loop.
"""

from __future__ import annotations

import heapq

from lightning_gpp.simulate.engine.compiled import (
    FINAL,
    MEET_SEND,
    RECEIVE,
    REDUCE,
    SEND,
    WORK,
    Compiled,
)
from lightning_gpp.simulate.engine.events_sums import SumEvents
from lightning_gpp.simulate.engine.times import Entry, Times


def play(compiled: Compiled, num_steps: int = 1) -> Times:
    """Plays steps one after the other.

    A stream begins its next step when it is through with the last one.

    Args:
        compiled: what happens in a step.
        num_steps: how many.
    """
    operations, transfers = compiled.operations, compiled.transfers
    first, codes, arguments = operations.first, operations.codes, operations.arguments
    seconds, transfer_s, channels = operations.seconds, transfers.seconds, transfers.channels
    num_operations, num_transfers = len(codes), len(transfer_s)
    times = Times(num_steps, num_operations, num_transfers)
    start_s, end_s, ready_s, cause = times.start_s, times.end_s, times.ready_s, times.cause
    first_transfer = times.first_transfer
    free_s = [0.0] * len(compiled.channels)
    freed_by = [-1] * len(compiled.channels)
    queue: list[Entry] = []
    push, pop = heapq.heappush, heapq.heappop
    sums = SumEvents(compiled, times, queue)
    waiting: dict[int, list[int]] = {}
    met: dict[int, tuple[float, int, int]] = {}
    state = [(first[stream], 0, 0.0, -1) for stream in range(compiled.num_streams)]
    runnable = list(reversed(range(compiled.num_streams)))
    while runnable or queue:
        if not runnable:
            ready, _, slot = pop(queue)
            number = (slot - first_transfer) % num_transfers
            ready_s[slot - first_transfer] = begin = ready
            for channel in channels[number]:
                if free_s[channel] > begin:
                    begin = free_s[channel]
                    cause[slot] = freed_by[channel]
            done = begin + transfer_s[number]
            start_s[slot], end_s[slot] = begin, done
            for channel in channels[number]:
                free_s[channel] = done
                freed_by[channel] = slot
            if slot in waiting:
                runnable += waiting.pop(slot)
            continue
        stream = runnable.pop()
        position, step, clock, last = state[stream]
        stop = first[stream + 1]
        before = step * num_operations
        transfers_before = first_transfer + step * num_transfers
        while True:
            if position == stop:
                times.step_end_s[step] = max(times.step_end_s[step], clock)
                step += 1
                if step == num_steps:
                    break
                position = first[stream]
                before += num_operations
                transfers_before += num_transfers
                continue
            code = codes[position]
            if code == WORK:
                slot = before + position
                start_s[slot], cause[slot] = clock, last
                clock += seconds[position]
                end_s[slot] = clock
                last = slot
            elif code == RECEIVE:
                slot = transfers_before + arguments[position]
                arrival = end_s[slot]
                if arrival < 0.0:
                    waiting[slot] = [stream]
                    break
                if arrival > clock:
                    clock, last = arrival, slot
            elif code == SEND:
                slot = transfers_before + arguments[position]
                cause[slot] = last
                push(queue, (clock, before + position, slot))
            elif code == FINAL:
                slot = before + position
                start_s[slot], cause[slot] = clock, last
                clock += seconds[position]
                end_s[slot] = clock
                last = slot
                sums.final(stream, step, position)
            elif code == REDUCE:
                sums.flush(stream, step, arguments[position], clock, last)
                missing, clock, last = sums.wait(arguments[position], step, clock, last)
                if missing >= 0:
                    waiting.setdefault(missing, []).append(stream)
                    break
            else:
                slot = transfers_before + arguments[position]
                arrival = end_s[slot]
                if arrival < 0.0:
                    waiting.setdefault(slot, []).append(stream)
                    if slot not in met:
                        met[slot] = clock, last, before + position
                    else:
                        met_s, met_last, met_place = met.pop(slot)
                        cause[slot] = last if clock >= met_s else met_last
                        place = before + position if code == MEET_SEND else met_place
                        push(queue, (max(clock, met_s), place, slot))
                    break
                if arrival > clock:
                    clock, last = arrival, slot
            position += 1
        state[stream] = position, step, clock, last
    times.stuck = {s: state[s][0] for s in range(compiled.num_streams) if state[s][1] < num_steps}
    for step in range(num_steps):
        begin_slot = first_transfer + step * num_transfers
        ends = end_s[begin_slot : begin_slot + num_transfers]
        times.step_end_s[step] = max([times.step_end_s[step], *ends])
    return times
