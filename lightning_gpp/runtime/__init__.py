"""Runs programs: transports between ranks, the interpreter, gradients, suspended steps."""
