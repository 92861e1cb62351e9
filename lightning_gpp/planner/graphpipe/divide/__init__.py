"""All divisions of a space that are fast enough: the dynamic program for one limit."""
