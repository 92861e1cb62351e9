"""How many samples a profile of PipeDream was measured with, where its sizes show it.

The files do not say it, and every rate depends on it. Two kinds of lines give it away: the image
that goes in, whose size is known (``3 x 224 x 224`` float32 and the like), and the state that an
LSTM hands on, one vector of its hidden size per sample. Checked against PipeDream's shipped
profiles: 128 images (256 for squeezenet), 32 sentences for gnmt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

IMAGE_WIDTHS = (224, 299, 331)
"""Square images of ImageNet models in pixels: most of them, Inception, NASNet large."""

FLOAT_BYTES = 4
COLOURS = 3


def profiled_samples(nodes: Iterable[tuple[str, Sequence[float]]], source: str) -> int:
    """Samples of the profiled mini-batch.

    Args:
        nodes: description and bytes of each result of every operator.
        source: name of the file, for the error.

    Raises:
        ValueError: nothing shows it, or several things show different numbers.

    >>> profiled_samples([("Input", [128 * 3 * 224 * 224 * 4.0])], "vgg16.txt")
    128
    """
    found = {count for text, sizes in nodes for count in _counts(text, sizes)}
    if len(found) != 1:
        seen = f"its sizes fit {sorted(found)}" if found else "no size in it shows how many"
        raise ValueError(
            f"{source}: a profile does not tell how many samples it was measured with, and {seen}; "
            "give samples=..."
        )
    return found.pop()


def _counts(description: str, sizes: Sequence[float]) -> Iterable[int]:
    if description.startswith("Input"):
        yield from _fitting(sizes[0], [COLOURS * width**2 for width in IMAGE_WIDTHS])
    elif (lstm := re.match(r"LSTM\(\d+, (\d+)\)", description)) and len(sizes) > 1:
        yield from _fitting(sizes[1], [int(lstm.group(1))])


def _fitting(size_bytes: float, features: Iterable[int]) -> Iterable[int]:
    for count in features:
        if size_bytes and size_bytes % (count * FLOAT_BYTES) == 0:
            yield int(size_bytes / (count * FLOAT_BYTES))
