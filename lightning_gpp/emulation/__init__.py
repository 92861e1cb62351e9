"""Emulated devices: a real executor, real messages, at the pace of a described cluster.

A rank has a *cursor* on a clock that all ranks share: emulated time, of which a second lasts
``time_scale`` real ones. What it does moves the cursor by its duration, which comes from the same
:class:`~lightning_gpp.simulate.program_costs.ProgramCosts` that a simulation reads; then the rank
sleeps until the clock is there. So the work of the interpreter does not add up.

- A compute action does its real work at once and lasts from the cursor on for as long as its stage
  takes.
- A message leaves at the sender's cursor, or when all of its channels are free
  (:func:`lightning_gpp.cluster.channels`), and carries the moment of its arrival along; the
  receiver waits until then. Who has a channel when is agreed in one place
  (:mod:`.shared`), in the order in which messages are ready.
- A sum of gradients begins when its bucket is final, a part of the time into the last backward of
  its stage, and when all of its ranks have come to it and the channels are free; it runs beside
  compute, and the REDUCE action waits for its end.
- *Slip*: what takes longer really than its emulated time ends late, and all that follows on its
  rank with it. It is noted and part of what is measured.
  Actions that take no emulated time (a send, say) are not late themselves: what follows them makes
  up for their real work, or slips.

The processes of one host share a file of reservations. To run an executor on an emulated device,
give it three things::

    rank = EmulatedRank(EmulatedClock(origin_ns, time_scale), reservations, costs)
    executor.pace = rank
    executor.transport = EmulatedTransport(transport, rank, rank_of_device)
    executor.sums = EmulatedSums(sums, rank)

What happens outside of programs takes an emulated time inside of ``with rank.lasting(…)``.

A run asks its :class:`~lightning_gpp.emulation.real_time.RealTime`, which does nothing, for the
time of its steps; :class:`~lightning_gpp.emulation.emulation.Emulation` is another kind of it.
"""
