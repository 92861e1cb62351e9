"""The cheapest program of a theory: operators eliminated one by one, or a 0-1 program."""
