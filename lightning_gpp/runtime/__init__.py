"""Runs programs: messages between ranks, the executor, gradients, suspended steps.

``executor`` runs a program, ``stage_run`` its stages; ``payload`` is what flows between them,
``sums`` adds gradients up, ``collectives`` is for SPMD programs, ``waits`` is what a rank waits
for. Folders: ``transport`` has messages, ``processes`` the processes of a run.
"""
