"""Training on GPUs that are none: see the README beside this file."""
