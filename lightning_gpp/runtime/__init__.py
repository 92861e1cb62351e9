"""Runs programs: transports between ranks, the interpreter, gradients, suspended steps.

``executor`` runs a program, ``stage_run`` its stages; ``payload`` is what flows between them, and
``waits`` what a rank waits for.

Folders: ``transport`` has messages, ``sums`` those of gradients, ``collectives`` those of SPMD
programs, ``processes`` the processes of a run.
"""
