"""Simulating plans, and what the job ``simulate`` says of them."""
