"""Plays the work of a step: how long it takes, and what waits for what.

Planners and simulations make :class:`~lightning_gpp.engine.work.Work` of plans and programs; one
player (:mod:`lightning_gpp.engine.play`) tells their seconds.
"""
