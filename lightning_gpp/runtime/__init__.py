"""Runs programs: transports between ranks, the interpreter, gradients, suspended steps.

``executor`` runs a program, ``stage_run`` its stages, ``handover`` and ``payload`` what flows
between them.

Folders: ``transport`` has messages, ``sums`` those of gradients, ``processes`` the processes of a
run, ``emulation`` emulated devices.
"""
