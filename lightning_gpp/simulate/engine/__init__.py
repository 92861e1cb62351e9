"""From a program and its costs to the work that :mod:`lightning_gpp.engine` plays."""
