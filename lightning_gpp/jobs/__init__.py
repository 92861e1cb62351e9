"""The jobs of the console command, one module each.

A job is a function from the resolved configuration and the run's folder to the metrics that a
sweep shows, chosen by the configuration group ``job``. Modules here import torch and Lightning
only inside the functions that need them: planning starts without either.

``problem`` is the question, ``search`` asks planners within limits, ``table`` writes rows as text,
JSON and CSV, ``sweep`` says what jobs of a sweep did.
"""
