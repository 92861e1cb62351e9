"""Click prediction from numbers and categories: DLRM on tables, logs and a generated click log."""

from .adult import Adult
from .clicks import Clicks
from .criteo import Criteo
from .data import ClickData
from .default_data import dlrm_data
from .interaction import DotInteraction
from .model import DLRM

__all__ = ["DLRM", "Adult", "ClickData", "Clicks", "Criteo", "DotInteraction", "dlrm_data"]
