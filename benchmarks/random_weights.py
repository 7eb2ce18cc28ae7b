"""The random matrices that the tiny models' weights are made of."""

import torch
from torch import Tensor


class Drawn:
    """Draws from one seed, in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        values: Tensor = self.normal(rows, columns) * (gain * columns**-0.5)
        return values

    def orthonormal(self, rows: int, columns: int) -> Tensor:
        """A matrix with orthonormal columns in random directions."""
        columns_of: Tensor = torch.linalg.qr(self.normal(rows, columns))[0]
        return columns_of

    def directions(self, rows: int, columns: int) -> Tensor:
        return torch.nn.functional.normalize(self.normal(rows, columns), dim=1)
