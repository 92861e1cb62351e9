"""Emulated devices under Lightning: their pace, what they report, shapes without numbers."""
