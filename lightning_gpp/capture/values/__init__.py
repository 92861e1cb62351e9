"""What goes into a forward and comes out of it: arguments, containers, samples of them."""
