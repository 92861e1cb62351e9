"""Playing the orders of devices, by hand."""

from __future__ import annotations

from lightning_gpp.engine.play import play
from lightning_gpp.engine.trace import WorkTrace
from lightning_gpp.engine.work import Sum, Work
from lightning_gpp.graph import FEED
from lightning_gpp.planner.step_time.least_step import TimedEdge, TimedStage, least_step_s

# Items are numbered on: forwards of a stage, its backwards, the next stage. Port 0 is of device 0.


def two_stages() -> Work:
    """The feed (item 8) and two stages, the gradients of the second are summed.

    .. code-block:: text

        stage 0   F0 at 0.25, F1 at 1.25                              B0 at 4.25, B1 at 6.25
        stage 1            F0 at 1.75, B0 at 2.75, F1 at 3.75, B1 at 4.75, 3 s of sums
    """
    return Work(
        seconds=[1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        missing=[1, 1, 1, 1, 1, 1, 0, 0, 0],
        sends=[
            *(((4, 0.5, 0, ()),), ((5, 0.5, 0, ()),), (), ()),
            *((), (), ((2, 0.5, 1, ()),), ((3, 0.5, 1, ()),)),
            ((0, 0.25, 2, ()), (1, 0.25, 2, ())),
        ],
        lines=[[0, 1, 2, 3], [8, 4, 6, 5, 7]],
        sums=[Sum((1,), (7,), ((1.0, 3.0),), 3, ())],
        num_ports=4,
    )


def test_two_stages_and_their_messages():
    found = play(two_stages())
    assert found.start_s == [0.25, 1.25, 4.25, 6.25, 1.75, 3.75, 2.75, 4.75, 0.0]
    assert found.step_s == 8.75
    assert found.stuck == {}
    stages = [TimedStage(1, 1, 2, 1.0, 2.0), TimedStage(1, 1, 2, 1.0, 1.0, end_s=3.0)]
    edges = [TimedEdge(FEED, 0, 0.25, None), TimedEdge(0, 1, 0.5, 0.5)]
    assert least_step_s(stages, edges) == 1.75 + 4.0 + 3.0


def test_what_is_too_late_is_not_played_to_its_end():
    assert play(two_stages(), at_most_s=8.25) is not None  # a device that ends in time is played on
    assert play(two_stages(), at_most_s=8.0) is None


def test_causes_lead_from_the_end_to_the_start():
    """The sum, B1, F1, and all that stage 1 did since its first input; then messages and the feed.

    Messages are those of stage 0 (slots 9 and 10), of stage 1 (11, 12) and of the feed (13, 14).
    """
    work = two_stages()
    found = WorkTrace(work, play(work))
    path = [15]
    while found.cause[path[-1]] >= 0:
        path.append(found.cause[path[-1]])
    assert path == [15, 7, 5, 6, 4, 9, 0, 13, 8]
    ends_s = [8.75, 5.75, 4.75, 3.75, 2.75, 1.75, 1.25, 0.25, 0.0]
    assert [found.end_s[slot] for slot in path] == ends_s
    assert (found.ready_s[14], found.start_s[14], found.cause[14]) == (0.0, 0.25, 13)  # of one port


def test_a_stage_with_larger_micro_batches_waits_for_all_parts():
    work = Work(
        seconds=[1.0] * 8 + [2.0] * 4,
        missing=[0] * 4 + [1] * 4 + [2, 2, 0, 0],
        sends=[
            *[((target, 0.0, 0, ()),) for target in (8, 8, 9, 9)],
            *[()] * 6,
            *[((a, 0.5, 1, ()), (b, 0.5, 1, ())) for a, b in ((4, 5), (6, 7))],
        ],
        lines=[[0, 1, 2, 3, 4, 5, 6, 7], [8, 10, 9, 11]],
        num_ports=2,
    )
    # The second part comes 0.5 s after the first.
    assert play(work).start_s == [0.0, 1.0, 2.0, 3.0, 6.5, 7.5, 10.5, 11.5, 2.0, 6.0, 4.0, 8.0]
    stages = [TimedStage(1, 1, 4, 1.0, 1.0), TimedStage(2, 1, 2, 2.0, 2.0)]
    assert least_step_s(stages, [TimedEdge(0, 1, 0.0, 0.5)]) == 2.0 + 8.0 + 2.5


def test_replicas_wait_for_each_other_where_gradients_are_summed():
    """Both in buckets of 1 s, the first final when half of the backward is done."""
    work = Work([1.0, 2.0, 1.0, 2.0], [0, 0, 1, 0], [()] * 4, [[0, 1], [2, 3]])
    work.sends[0] = ((2, 0.5, 0, ()),)
    work.num_ports = 2
    work.sums.append(Sum((0, 1), (1, 3), ((0.5, 1.0), (1.0, 1.0)), 1, ()))
    # device 1 begins its backward at 2.5 s
    assert play(work).step_s == 2.5 + 1.0 + 1.0 + 1.0


def test_a_device_begins_sums_in_their_order():
    """The gradients of the second sum are final at once, those of the first one at 2 s."""
    work = Work([1.0, 1.0], [0, 0], [()] * 2, [[0, 1]], num_channels=1)
    work.sums += [Sum((0,), (last,), ((1.0, 1.0),), 0, (0,)) for last in (1, 0)]
    found = play(work)
    assert (found.step_s, found.served) == (4.0, [(True, 0), (True, 1)])


def test_messages_on_one_channel_follow_one_another_as_they_become_ready():
    """Two devices send to a third over one bus; what is ready first goes first."""
    sends = [((2, 3.0, 0, (0,)),), ((3, 3.0, 0, (0,)),), (), ()]
    lines = [[0], [1], [2], [3]]
    work = Work([2.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], sends, lines, num_channels=1)
    found = play(work)
    assert found.start_s == [0.0, 0.0, 1.0 + 3.0 + 3.0, 1.0 + 3.0]
    assert WorkTrace(work, found).cause == [-1, -1, 4, 5, 5, 1]


def test_sums_share_channels_with_messages():
    work = Work([1.0, 1.0], [0, 1], [((1, 3.0, 0, (0,)),), ()], [[0], [1]], num_channels=1)
    work.sums.append(Sum((0,), (0,), ((0.5, 2.0),), 0, (0,)))
    found = play(work)
    assert (found.start_s, found.step_s) == ([0.0, 5.5], 6.5)
    assert found.served == [(True, 0), (False, 0)]


def test_devices_that_wait_for_ever_are_named():
    """Device 1 wants two micro-batches before it answers; device 0 wants an answer first."""
    work = Work(
        seconds=[1.0] * 8,
        missing=[0, 0, 1, 1, 1, 1, 0, 0],
        sends=[
            *(((4, 0.0, 0, ()),), ((5, 0.0, 0, ()),), (), ()),
            *((), (), ((2, 0.0, 1, ()),), ((3, 0.0, 1, ()),)),
        ],
        lines=[[0, 2, 1, 3], [4, 5, 6, 7]],
        num_ports=2,
    )
    assert play(work).stuck == {0: 2, 1: 5}
