"""The cheapest program of a theory: A* over what the devices hold."""
