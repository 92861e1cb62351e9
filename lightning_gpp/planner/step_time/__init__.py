"""How long a step of a plan takes: played, predicted, or at least; and what each device does."""
