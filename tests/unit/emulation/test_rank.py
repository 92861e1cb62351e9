"""The pace of one rank, exactly, by a clock that only goes on when it is told to."""

from __future__ import annotations

import pytest
import torch
from helpers.fake_time import FakeTime
from helpers.threads.reservations import LocalReservations
from helpers.threads.sums import ThreadSumHub, ThreadSums
from helpers.threads.transport import ThreadHub

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.emulation.clock import Slip
from lightning_gpp.emulation.rank import EmulatedRank
from lightning_gpp.emulation.sums import EmulatedSums
from lightning_gpp.emulation.transport import EmulatedTransport
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.payload import pack
from lightning_gpp.schedule import Action, Program, build_program
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    Overhead,
    ProgramCosts,
    StageCosts,
    StepCosts,
)

LINK = Link(bandwidth_bytes_per_s=16.0, latency_s=1.0)  # a message of 16 bytes takes 2 s
CHAIN = StageGraph(2, (StageEdge(FEED, 0, ("x",), has_backward=False), StageEdge(0, 1, ("h",))))
"""x -> stage 0 on device 0 -> stage 1 on device 1, which also has the feed."""

EDGES = {(FEED, 0): MessageBytes(8.0), (0, 1): MessageBytes(16.0)}


def chain_program(num_microbatches: int = 2) -> Program:
    return build_program(CHAIN, devices=[0, 1], num_microbatches=num_microbatches)


def chain_costs(**step: object) -> ProgramCosts:
    stages = (StageCosts(forward_s=4.0, backward_s=8.0), StageCosts(2.0, 4.0))
    return ProgramCosts(uniform_cluster(2, LINK), stages, EDGES, EDGES, step=StepCosts(**step))


class Ranks:
    """Emulated ranks that one thread drives, one after the other."""

    def __init__(
        self, program: Program, costs: ProgramCosts, time: FakeTime, scale: float = 1.0
    ) -> None:
        clock, reservations, every = (
            time.clock(scale),
            LocalReservations(),
            range(len(program.actions)),
        )
        hub, sum_hub = ThreadHub(len(every)), ThreadSumHub()
        self.ranks = [EmulatedRank(r, clock, reservations, lambda _: costs) for r in every]
        self.transports = [
            EmulatedTransport(hub.transport(r), self.ranks[r], tuple(every)) for r in every
        ]
        self.sums = [EmulatedSums(ThreadSums(sum_hub, r), self.ranks[r]) for r in every]

    def send(self, rank: int, text: str) -> None:
        action, values = Action.parse(text), [torch.ones(3)]
        with self.ranks[rank].action(action):
            self.transports[rank].send(pack(values), target=1 - rank, tag=action.message)

    def receive(self, rank: int, text: str) -> torch.Tensor:
        action = Action.parse(text)
        with self.ranks[rank].action(action):
            payload = self.transports[rank].receive(
                source=1 - rank, tag=action.message, timeout_s=1.0, purpose=text
            )
        (tensor,) = payload.tensors
        return tensor


def test_compute_lasts_its_emulated_time_whatever_its_real_work_takes():
    time, program = FakeTime(), chain_program()
    rank = Ranks(program, chain_costs(), time, scale=0.5).ranks[0]
    with rank.run(program, device=0):
        for text, work_s in (("0F0", 1.5), ("0F1", 0.0), ("0B0", 3.75)):
            with rank.action(Action.parse(text)):
                time.work(work_s)
    assert rank.cursor_s == 4 + 4 + 8
    assert time.now_ns == 8_000_000_000
    assert time.slept_s == pytest.approx(8 - 1.5 - 3.75)
    assert rank.take_slips().slips == ()


def test_work_that_takes_longer_is_slip_and_what_follows_is_later():
    time, program = FakeTime(), chain_program()
    rank = Ranks(program, chain_costs(), time, scale=0.5).ranks[0]
    with rank.run(program, device=0):
        for text, work_s in (("0F0", 2.5), ("0F1", 2.0)):
            with rank.action(Action.parse(text)):
                time.work(work_s)
    slips = rank.take_slips()
    assert slips.slips == (Slip(0, "0F0", pytest.approx(1.0)),)  # 0.5 s here are 1 s there
    assert slips.total_s == pytest.approx(1.0)
    assert rank.cursor_s == pytest.approx(9.0)
    assert rank.take_slips().slips == ()


def test_messages_leave_one_after_the_other_and_arrive_after_their_time():
    """Two sends at 4 s take 2 s each on one port; the receiver waits for both."""
    time, program = FakeTime(), chain_program()
    ranks = Ranks(program, chain_costs(), time)
    with ranks.ranks[0].run(program, device=0), ranks.ranks[1].run(program, device=1):
        with ranks.ranks[0].action(Action.parse("0F0")):
            pass
        ranks.send(0, "0SF0>1")
        ranks.send(0, "0SF1>1")
        assert ranks.ranks[0].cursor_s == 4.0  # a sender goes on
        time.now_ns = 5_000_000_000
        assert ranks.receive(1, "1RF0<0").tolist() == [1.0, 1.0, 1.0]
        assert ranks.ranks[1].cursor_s == 6.0
        assert time.now_ns == 6_000_000_000
        ranks.receive(1, "1RF1<0")
        assert ranks.ranks[1].cursor_s == 8.0


def test_a_message_that_is_there_costs_no_time():
    time, program = FakeTime(), chain_program()
    ranks = Ranks(program, chain_costs(), time)
    with ranks.ranks[0].run(program, device=0), ranks.ranks[1].run(program, device=1):
        ranks.send(0, "0SF0>1")
        ranks.ranks[1].cursor_s = 7.0
        time.work(9.0)  # real time is ahead; a receive is not late
        ranks.receive(1, "1RF0<0")
    assert ranks.ranks[1].cursor_s == 7.0
    assert ranks.ranks[1].take_slips().slips == ()


def test_what_devices_spend_on_messages_and_between_actions():
    time, program = FakeTime(), chain_program()
    costs = chain_costs(
        send=Overhead(fixed_s=1.0, per_byte_s=0.25),
        receive=Overhead(fixed_s=3.0),
        feed_s=0.5,
        action_s=0.125,
    )
    ranks = Ranks(program, costs, time)
    sender, receiver = ranks.ranks
    with sender.run(program, device=0), receiver.run(program, device=1):
        ranks.send(0, "0SF0>1")
        assert sender.cursor_s == 1 + 16 * 0.25
        ranks.receive(1, "1RF0<0")
        assert receiver.cursor_s == 5 + 2 + 3
        with receiver.action(Action.parse("-1F0")):
            pass
        assert receiver.cursor_s == 10 + 0.125 + 0.5


def test_a_sum_begins_inside_of_the_backward_and_runs_beside_it():
    """Two replicas: ready at 8 + 8/4 = 10 s and 12 + 8/4 = 14 s; 2 rounds of 1 + 8/16 s."""
    stages = StageGraph(
        2,
        (StageEdge(FEED, 0, ("x",), has_backward=False), StageEdge(0, 1, ("h",))),
        parameter_readers=(("w", (0,)),),
    )
    program = build_program(stages, devices=[(0, 1), 1], num_microbatches=2, multiples=[2, 2])
    pairs = ((FEED, 0), (FEED, 1), (0, 2), (1, 2))
    sizes = {pair: MessageBytes(16.0) for pair in pairs}
    costs = ProgramCosts(
        uniform_cluster(2, LINK),
        (StageCosts(4.0, 8.0), StageCosts(4.0, 8.0), StageCosts(1.0, 1.0)),
        sizes,
        sizes,
        (Bucket(0, 16.0, ready_fraction=0.25),),
    )
    time = FakeTime()
    ranks = Ranks(program, costs, time)
    tensors = [torch.full((2,), 1.0), torch.full((2,), 2.0)]
    pending = []
    for rank, (stage, start_s) in enumerate(((0, 8.0), (1, 12.0))):
        own = ranks.ranks[rank]
        own.cursor_s, time.now_ns = start_s, round(start_s * 1e9)
        with own.run(program, device=rank), own.action(Action.parse(f"{stage}B0")):
            pending.append(ranks.sums[rank].start(tensors[rank], (0, 1)))
        assert own.cursor_s == start_s + 8
    for rank, each in enumerate(pending):
        each.wait(1.0, "test")
        assert tensors[rank].tolist() == [3.0, 3.0]
        assert ranks.ranks[rank].cursor_s == max((16.0, 20.0)[rank], 14.0 + 2 * 1.5)


def test_costs_of_another_program_are_refused():
    program, time = chain_program(), FakeTime()
    costs = ProgramCosts(uniform_cluster(2, LINK), (StageCosts(1.0, 1.0),))
    rank = Ranks(program, costs, time).ranks[0]
    message = "costs of 1 stages"
    with pytest.raises(ValueError, match=message), rank.run(program, device=0):
        pass


def test_a_clock_that_goes_back_leaves_nothing_behind():
    """What ranks did is where it was; what comes is later on this machine's clock."""
    time, program = FakeTime(), chain_program()
    rank = Ranks(program, chain_costs(), time, scale=0.5).ranks[0]
    with rank.run(program, device=0):
        with rank.action(Action.parse("0F0")):
            pass
        time.work(3.0)  # an evaluation of 6 s there
        rank.clock.go_back(6.0)
        assert rank.clock.now_s() == rank.cursor_s == 4.0
        with rank.action(Action.parse("0F1")):
            time.work(2.0)
    assert rank.cursor_s == 8.0
    assert rank.take_slips().slips == ()
    assert time.now_ns == (2 + 3 + 2) * 1_000_000_000


def test_records_have_emulated_moments():
    time, program = FakeTime(), chain_program()
    rank = Ranks(program, chain_costs(), time, scale=0.5).ranks[0]
    record = ActionRecord(Action.parse("0F1"), 1, 2, loss_start_ns=1)
    with rank.run(program, device=0):
        for text in ("0F0", "0F1"):
            time.work(0.5)  # between actions: no emulated time
            with rank.action(Action.parse(text)):
                pass
    found = rank.timed(record)
    assert (found.start_ns, found.end_ns) == (2_000_000_000, 4_000_000_000)
    assert found.action == record.action and found.loss_start_ns is None


def test_messages_may_be_counted_on_from_earlier_runs():
    """A window of a longer training: its messages have the numbers of the training."""
    time, program = FakeTime(), chain_program()
    ranks = Ranks(program, chain_costs(), time)
    with ranks.ranks[0].run(program, device=0), ranks.ranks[0].action(Action.parse("0SF1>1")):
        later = (0, 1, False, 41)
        assert ranks.ranks[0].send(later, target_device=1) == 2.0
