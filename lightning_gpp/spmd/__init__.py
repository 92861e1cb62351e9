"""SPMD programs for devices of unequal speed.

Source: HAP (Zhang et al., EuroSys 2024, arXiv 2401.05965). A model at the level of ATen operators
(:class:`~lightning_gpp.spmd.operator_graph.SpmdGraph`) becomes a program that every device runs on
its own, unequal part of the tensors (:class:`~lightning_gpp.spmd.program.SpmdProgram`).
"""
