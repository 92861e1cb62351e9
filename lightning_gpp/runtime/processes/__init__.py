"""The processes of a run: which of them live, which device each has, how they find another."""
