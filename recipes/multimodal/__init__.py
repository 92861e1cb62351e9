"""Classification of samples seen through several views: one encoder per view, fusion, head."""

from .data import MultiViewData
from .datasets import Digits, MultipleFeatures, multimodal_data
from .model import MultimodalClassifier

__all__ = ["Digits", "MultiViewData", "MultimodalClassifier", "MultipleFeatures", "multimodal_data"]
