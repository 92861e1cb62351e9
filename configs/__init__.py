"""Hydra configuration groups of the console command, importable as ``lightning_gpp.configs``."""
