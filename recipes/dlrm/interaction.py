"""Products of every pair of feature vectors: the interaction of DLRM."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """Dot product of every pair of different vectors of a sample.

    Source: Naumov et al. 2019, arXiv 1906.00091, section 2.1: as in factorization machines, pairs
    of embeddings (and the processed dense features) interact through their dot products.

    Args:
        num_vectors: vectors per sample, F.

    Shapes:
        - ``forward(vectors)``: vectors ``(num_samples, F, width)``; returns
          ``(num_samples, F * (F - 1) / 2)``, in the order (1, 0), (2, 0), (2, 1), (3, 0), …

    Raises:
        ValueError: there are fewer than two vectors, so there is no pair.

    >>> DotInteraction(3)(torch.tensor([[[1.0, 0.0], [2.0, 5.0], [3.0, 1.0]]]))
    tensor([[ 2.,  3., 11.]])
    """

    pairs: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        if num_vectors < 2:
            raise ValueError(f"an interaction needs at least two vectors, got {num_vectors}")
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """The products below the diagonal of the Gram matrix of each sample."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.flatten(start_dim=1).index_select(1, self.pairs)
