"""What an SPMD program takes: seconds of computations and collectives, bytes on every device."""
