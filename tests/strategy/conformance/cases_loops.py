"""Loops: limits, intervals, several dataloaders, several calls on one Trainer."""

from __future__ import annotations

from conformance.case import Bench, Case


def validate_and_fit(bench: Bench) -> None:
    bench.validate()
    bench.fit()
    bench.validate()
    bench.test()
    bench.predict()


CASES = [
    Case("fit"),
    Case("validate, fit, validate, test, predict", script=validate_and_fit),
    Case("limit batches", trainer={"limit_train_batches": 3, "limit_val_batches": 2}),
    Case("limit batches by fractions", trainer={"limit_train_batches": 0.5}),
]
