"""Features with mean 0 and deviation 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Mean and deviation of each feature over the training samples.

    Shapes:
        - ``mean``, ``deviation``: ``(num_features,)``; constant features have deviation 1
    """

    mean: FloatArray
    deviation: FloatArray

    @classmethod
    def of(cls, values: FloatArray) -> Scale:
        """The scale of ``values``, shape ``(num_samples, num_features)``."""
        wide = values.astype(np.float64)
        deviation = wide.std(axis=0)
        deviation[deviation < 1e-6 * np.maximum(np.abs(wide).max(axis=0), 1e-12)] = 1.0
        return cls(wide.mean(axis=0).astype(np.float32), deviation.astype(np.float32))

    def apply(self, values: FloatArray) -> FloatArray:
        """``values`` with mean 0 and deviation 1, as far as they look like the training set."""
        return (values - self.mean) / self.deviation
