"""What may be chosen: the model as runs of units, what stages take, how many devices there are."""
