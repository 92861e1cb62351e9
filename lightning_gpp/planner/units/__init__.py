"""The model as planners cut it: units of operators, their orders, cuts and moves."""
