"""From a captured model and the devices found to a plan: measured, cached, written."""
