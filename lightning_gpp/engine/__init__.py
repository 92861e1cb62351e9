"""Plays what devices do in a step: how long it takes, and what everything waits for.

Planners and simulations make :class:`~lightning_gpp.engine.work.Work` of plans and programs; one
player (:mod:`lightning_gpp.engine.play`) tells their seconds.
"""
