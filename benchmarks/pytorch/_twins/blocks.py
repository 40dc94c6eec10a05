"""How the blocks of a twin run: as they are, or recomputed in groups in the backward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A way to run blocks.

    Attributes:
        recomputed: Whether each group is under `torch.utils.checkpoint`.
        size: How many blocks of a chain are one group.
    """

    recomputed: bool = False
    size: int = 1

    def __call__(self, block: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run one block."""
        return checkpoint(block, *args, use_reentrant=False) if self.recomputed else block(*args)

    def chain(self, blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        """Run blocks of which each reads the result of the one before it."""
        for start in range(0, len(blocks), self.size):
            x = self(self._group, blocks[start : start + self.size], x)
        return x

    @staticmethod
    def _group(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x
