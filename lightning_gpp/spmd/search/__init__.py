"""The cheapest program of a theory: operators eliminated one by one."""
