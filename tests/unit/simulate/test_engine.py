"""The simulator on programs whose step can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulations import simulated_stages, task_times

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.schedule import Action, ScheduleError
from lightning_gpp.schedule.schedules import FORWARD_ONLY
from lightning_gpp.simulate import (
    Bucket,
    SpanKind,
    TransferKind,
    simulate,
)


def hosts(*counts: int, host: Link, rack: Link | None = None) -> Cluster:
    """A cluster with so many devices in each host."""
    names = [f"host{number}" for number, count in enumerate(counts) for _ in range(count)]
    devices = tuple(Device(f"gpu{i}", host=name) for i, name in enumerate(names))
    return Cluster(devices, host, rack_link=rack)


# Closed forms --------------------------------------------------------------------------------


def chain(num_stages: int) -> str:
    return " ".join(f"{i}>{i + 1}" for i in range(num_stages - 1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 5), (4, 4), (6, 2), (5, 16)])
def test_balanced_chains_take_micro_batches_plus_stages(schedule: str, p: int, m: int) -> None:
    found = simulated_stages(chain(p), p, schedule=schedule, num_microbatches=m)
    assert found.step_s == (m + p - 1) * (1.0 + 2.0)


@pytest.mark.parametrize("c", [0.25, 1.0, 1.5, 4.0])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 5), (4, 4), (5, 8)])
def test_gpipe_with_messages(p: int, m: int, c: float) -> None:
    # each way: the first micro-batch through all stages, then one per beat of the slower of
    # compute and link
    found = simulated_stages(
        chain(p), p, schedule="gpipe", num_microbatches=m, message_bytes=c, link=Link(1.0)
    )
    ways_s = [(p - 1) * (work + c) + (m - 1) * max(work, c) + work for work in (1.0, 2.0)]
    assert found.step_s == sum(ways_s)


@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_1f1b_on_two_stages_with_messages(m: int) -> None:
    # a round trip brings a new forward: F, message, F and B on the other side, message, B; two
    # micro-batches share it
    c = 0.5
    found = simulated_stages(
        chain(2), 2, num_microbatches=m, message_bytes=c, link=Link(1.0), forward_s=1, backward_s=2
    )
    round_s = 2 * (1 + 2) + 2 * c
    pairs, odd = divmod(m, 2)
    expected = {0: pairs * round_s + 3.0, 1: (pairs + 1) * round_s}[odd]
    assert found.step_s == expected


# Two branches --------------------------------------------------------------------------------


def test_two_branches() -> None:
    """Branches of 1 s and 2 s, a join of 1 s and 1 s, messages of 0.5 s.

    .. code-block:: text

        seconds    0       1       2       3       4       5       6       7       8
        device 0   |--F0---|--F1---|               |------B0-------|------B1-------|
        device 1   |--F0---|--F1---|                   |------B0-------|------B1-------|
        device 2               |--F0---|--B0---|--F1---|--B1---|
        0 out              |0F0|   |0F1|
        1 out              |1F0|   |1F1|
        2 out                                  |>0 |>1 |       |>0 |>1 |
    """
    found = simulated_stages(
        "0>2 1>2",
        3,
        num_microbatches=2,
        message_bytes=0.5,
        link=Link(1.0),
        forward_s=[1, 1, 1],
        backward_s=[2, 2, 1],
    )
    assert found.step_s == 8.5
    assert task_times(found, device=1) == {
        "1F0": (0, 1), "1F1": (1, 2), "1B0": (4.5, 6.5), "1B1": (6.5, 8.5)
    }  # fmt: skip
    assert task_times(found, device=2) == {
        "2F0": (1.5, 2.5), "2B0": (2.5, 3.5), "2F1": (3.5, 4.5), "2B1": (4.5, 5.5)
    }  # fmt: skip
    assert task_times(found, TransferKind.MESSAGE)["2SB1>1"] == (6.0, 6.5)


# Channels ------------------------------------------------------------------------------------


def test_devices_of_a_host_share_its_network() -> None:
    """Both branches are in one host, the join in another.

    .. code-block:: text

        seconds    0       1       2       3       4       5       6       7
        device 0   |--F----|                           |-----B-----|  (B takes 2 s)
        device 1   |--F----|                               |-----B---------|
        device 2                   |--F----|--B----|
        private            |0>2|                   |>0 |>1 |
        shared             |0>2|1>2|               |>0 |>1 |
    """
    arguments = {
        "num_microbatches": 1,
        "message_bytes": 0.5,
        "forward_s": [1, 1, 1],
        "backward_s": [2, 2, 1],
    }
    private = hosts(2, 1, host=Link(9.0), rack=Link(1.0))
    found = simulated_stages("0>2 1>2", 3, cluster=private, **arguments)
    assert found.step_s == 6.5
    shared = hosts(2, 1, host=Link(9.0), rack=Link(1.0, is_shared=True))
    found = simulated_stages("0>2 1>2", 3, cluster=shared, **arguments)
    assert found.step_s == 7.0
    (late,) = (t for t in found.tasks if str(t.action) == "1SF0>2")
    assert (late.ready_s, late.start_s, late.end_s) == (1.0, 1.5, 2.0)
    assert late.channels == ("gpu1 out", "host0 out", "host1 in")


def test_a_half_duplex_port_sends_or_receives() -> None:
    """The middle stage receives its second micro-batch while it has the first one to send.

    .. code-block:: text

        seconds       0    1    2    3    4    5    6    7    8    9    10
        device 0      |-F0-|-F1-|
        0>1                |--- 0 ---|--- 1 ---|
        device 1                     |-F0-|    |-F1-|
        1>2, full                         |--- 0 ---|--- 1 ---|
        1>2, half                              |--- 0 ---|--- 1 ---|
        device 2, half                                   |-F0-|    |-F1-|
    """
    for is_full_duplex, step_s in ((True, 9.0), (False, 10.0)):
        found = simulated_stages(
            chain(3),
            3,
            num_microbatches=2,
            message_bytes=2.0,
            link=Link(1.0, is_full_duplex=is_full_duplex),
            schedule=FORWARD_ONLY,
        )
        assert found.step_s == step_s


# Sends ---------------------------------------------------------------------------------------


# Sums of gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fractions", "step_s"),
    [((0.5, 1.0), 7.0), ((1.0, 1.0), 9.0), ((0.0, 0.25), 5.0), ((1.0, 0.5), 9.0)],
)
def test_sums_begin_during_the_last_backward(fractions: tuple[float, ...], step_s: float) -> None:
    """Two replicas, forward 1 s, backward 4 s, two buckets of 2 bytes: each sum takes 2 s.

    .. code-block:: text

        seconds           0    1    2    3    4    5    6    7    8    9
        both devices      |-F--|---------B---------|
        ready at 1/2, 1                  |--sum 0--|--sum 1--|
        both at the end                            |--sum 0--|--sum 1--|
        ready at 1, 1/2                            |--sum 0--|--sum 1--|  (the order is fixed)
        ready at 0, 1/4        |--sum 0--|--sum 1--|
    """
    found = simulated_stages(
        "0>1",
        2,
        devices=[(0, 1), 0],
        shares=[(1, 1), (2,)],
        num_microbatches=2,
        forward_s=[1, 1, 0],
        backward_s=[4, 4, 0],
        message_bytes=0.0,
        link=Link(1.0),
        buckets=[Bucket(0, 2.0, fraction) for fraction in fractions],
    )
    assert found.step_s == step_s


def test_messages_do_not_wait_for_the_end_of_a_sum() -> None:
    """The gradients that stage 0 waits for come while the replicas of stage 1 are summed.

    Once they waited for the port of a device until the sum was over: steps of models with large
    replicated layers came out a fifth too long.

    .. code-block:: text

        seconds             0    1    2    3    4    5    6    7    8    9  ...  24
        device 0, stage 0   |-F0-|-F1-|              |---B0----|---B1----|
        device 1, stage 1        |-F--|    |----B----|
        device 2, stage 1             |-F--|----B----|
        sum of stage 1                          |--------------------- ... ------|
    """
    found = simulated_stages(
        "0>1 1>2",
        3,
        devices=[0, (1, 2), 1],
        shares=[(1,), (1, 1), (2,)],
        num_microbatches=2,
        forward_s=[1, 1, 1, 0],
        backward_s=[2, 2, 2, 0],
        message_bytes=0.0,
        link=Link(1.0),
        buckets=[Bucket(0, 20.0, 0.5)],
    )
    assert task_times(found, TransferKind.SUM) == {"1R0": (4.0, 24.0)}
    backwards = task_times(found, SpanKind.BACKWARD)
    assert backwards["0B0"] == (5.0, 7.0)
    assert backwards["0B1"] == (7.0, 9.0)


def test_a_device_that_only_holds_a_replica_takes_part_in_its_sums() -> None:
    # a mini-batch that is too small for two replicas: device 1 computes nothing and is ready at
    # once, device 0 half-way through its backward from 1 to 5 s
    found = simulated_stages(
        "0>1",
        2,
        devices=[0, 0],
        holders=[(0, 1), (0,)],
        num_microbatches=1,
        forward_s=[1, 0],
        backward_s=[4, 0],
        link=Link(1.0),
        buckets=[Bucket(0, 3.0, 0.5)],
    )
    assert [task.kind for task in found.tasks if task.device == 1] == []
    assert task_times(found, TransferKind.SUM) == {"0R0": (3.0, 6.0)}
    assert found.step_s == 6.0


def test_parameters_that_stages_share_are_summed_by_their_owner() -> None:
    # device 1 is done at 4 s, and its gradients are at the owner at 5 s; device 0 is done at 6 s,
    # and the sum is back at 7 s
    found = simulated_stages(
        chain(2),
        2,
        num_microbatches=1,
        link=Link(1.0),
        readers={"tied": (0, 1)},
        buckets=[Bucket(0, 1.0)],
    )
    assert found.step_s == 7.0


# Steps and their input -----------------------------------------------------------------------


# Memory --------------------------------------------------------------------------------------


def test_memory_over_time() -> None:
    """Two stages of 1 s forward and backward, 1F1B; 10 bytes fixed, 2 per forward, 1 to work.

    .. code-block:: text

        seconds    0    1    2    3    4    5    6    7    8
        device 0   |-F0-|-F1-|    |-B0-|-F2-|-B1-|    |-B2-|
        bytes      12   14        15   14   15   12   13   10
    """
    found = simulated_stages(
        chain(2),
        2,
        num_microbatches=3,
        backward_s=1.0,
        memory=(10.0, 2.0, 1.0),
    )
    assert list(found.device_memory[0]) == [
        (0, 10), (0, 12), (1, 14), (3, 15), (4, 12), (4, 14), (5, 15), (6, 12), (7, 13), (8, 10)
    ]  # fmt: skip
    assert max(size for _, size in found.device_memory[1]) == 13


# What cannot be simulated --------------------------------------------------------------------


CHAIN = simulated_stages(chain(3), 3)


def test_a_deadlock_is_named_with_what_devices_wait_at() -> None:
    (first, *others) = CHAIN.program.actions
    program = replace(CHAIN.program, actions=((Action.parse("0RB0<1"), *first), *others))
    with pytest.raises(ScheduleError) as error:
        simulate(program, CHAIN.costs)
    assert str(error.value) == ("the program deadlocks: devices wait, 0 at 0F0; 1 at 1F0; 2 at 2F0")
