"""Pure data parallelism (synchronous SGD) as a program: the special case of one stage."""
