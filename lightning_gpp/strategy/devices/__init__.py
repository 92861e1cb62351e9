"""The accelerators and the devices that a run has."""
