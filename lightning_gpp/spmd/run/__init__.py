"""Running SPMD programs: export, collectives under autograd, the interpreter."""
