"""From a captured model and the devices at hand to a plan; measured, cached, written."""
