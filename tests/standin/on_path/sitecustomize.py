"""Python imports this at its start where the folder is on ``PYTHONPATH``: GPUs for the process.

Nothing but a finder that waits for ``import torch``; a process that imports no torch loads none.
"""

import os

from standin_gpus.start import LIBRARIES, at_import_of_torch

if LIBRARIES in os.environ:
    at_import_of_torch()
