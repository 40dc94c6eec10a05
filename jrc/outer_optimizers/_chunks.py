"""The chunks of a leaf: square tiles of matrices, and pieces of all other leaves.

A tile has neighbouring rows and columns, so that a chunk holds few neurons whole, not one row of
many. Tiles and pieces are of equal sizes, as large as the limit allows, so that little is padded.
"""

import dataclasses
import math

import jax.numpy as jnp

from jrc._typing import Array, Float


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a leaf is cut into chunks of equal sizes.

    Attributes:
        shape: Shape of the leaf.
        tiles: Tiles along rows and columns; `(count, 1)` for pieces.
        tile: Rows and columns of a tile; `(width, 1)` for pieces.
    """

    shape: tuple[int, ...]
    tiles: tuple[int, int]
    tile: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return math.prod(self.tiles)

    @property
    def width(self) -> int:
        """Entries of a chunk, padding included."""
        return math.prod(self.tile)

    @property
    def size(self) -> int:
        """Entries of the leaf."""
        return math.prod(self.shape)

    def split(self, leaf: Float[Array, "..."]) -> Float[Array, "count width"]:
        """Return the entries of a leaf, chunk by chunk, padded with zeros."""
        (down, across), (rows, columns) = self.tiles, self.tile
        matrix = leaf.reshape(self._matrix)
        missing = (down * rows - matrix.shape[0], across * columns - matrix.shape[1])
        padded = jnp.pad(matrix, [(0, n) for n in missing])
        tiles = padded.reshape(down, rows, across, columns).transpose(0, 2, 1, 3)
        return tiles.reshape(self.count, self.width)

    def join(self, chunks: Float[Array, "count width"]) -> Float[Array, "..."]:
        """Return the leaf of such chunks; what is padding is dropped."""
        (down, across), (rows, columns) = self.tiles, self.tile
        tiles = chunks.reshape(down, across, rows, columns).transpose(0, 2, 1, 3)
        matrix = tiles.reshape(down * rows, across * columns)
        return matrix[: self._matrix[0], : self._matrix[1]].reshape(self.shape)

    @property
    def _matrix(self) -> tuple[int, int]:
        return _matrix_of(self.shape) if self.tile[1] > 1 else (self.size, 1)


def chunks_of(shape: tuple[int, ...], most: int) -> Chunks:
    """Return the chunks of a leaf, each of at most `most` entries.

    Args:
        shape: Shape of the leaf, with at least one entry. Leading dimensions are rows.
        most: Largest size of a chunk; tiles are at most its square root wide.

    Returns:
        The cut.

    >>> chunks_of((128, 192), 4096)
    Chunks(shape=(128, 192), tiles=(2, 3), tile=(64, 64))
    >>> chunks_of((5000,), 4096)
    Chunks(shape=(5000,), tiles=(2, 1), tile=(2500, 1))
    """
    side = math.isqrt(most)
    rows, columns = _matrix_of(shape)
    if side > 1 and min(rows, columns) >= side:
        down, across = -(-rows // side), -(-columns // side)
        return Chunks(shape, (down, across), (-(-rows // down), -(-columns // across)))
    size = math.prod(shape)
    count = -(-size // most)
    return Chunks(shape, (count, 1), (-(-size // count), 1))


def _matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns: all leading dimensions, and the last."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, math.prod(shape))
