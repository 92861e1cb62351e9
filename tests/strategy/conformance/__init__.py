"""The conformance table: what Lightning promises, on one device and as a pipeline.

A *case* (:class:`conformance.case.Case`) is a small module, its data, the arguments of the
Trainer and what is called on it, under a name. Every case runs on one plain device and by a random
plan on two or three ranks, and some run in other ways, too; everything it *noted* must be the same.
Cases stand in tables in ``cases_*.py``::

    CASES = [
        Case("limit_train_batches=3", trainer={"limit_train_batches": 3}),
        Case("validate", script=validate_only),
    ]

``test_conformance.py`` lists the tables; a new file of cases is added there.

What is compared (:class:`conformance.case.Bench` gathers it):

- ``everywhere``: on every rank: metrics after each call on the Trainer, counters, what
  ``trainer.validate`` and ``trainer.test`` return, and whatever a case notes by
  ``bench.everywhere[name] = value``. A callback with an attribute ``record`` (a dict) is noted
  too, under its class name.
- ``on_rank_0``: what exists there only: weights, logger rows, predictions, and what a case notes
  by ``bench.on_rank_0[name] = value``.

Values may be nested dicts, lists, tuples of numbers, strings, tensors and arrays
(:func:`helpers.alike.differences` compares them). Run one case with
``pytest tests/strategy/conformance -k "name"``.
"""
