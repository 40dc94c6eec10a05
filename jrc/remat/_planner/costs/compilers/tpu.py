"""XLA's compiler for TPUs."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp

from jrc._jaxpr import Program, View, facts_of, has_default_precision, takes_one_of_each_row
from jrc.remat._planner.costs.compilers.compiler import Compiler

_LANES = 128
_SUBLANES = 8
_WORD = 4
_REACHED = 0.8
_ON_CHIP = 128 * 2**20


class _Tpu(Compiler):
    continues_products = True
    # What reads the rows again is another kernel, most often the next product, so that the result
    # is written in any case: a transformer whose plans save it takes a fifth less on a v5e.
    reads_rows_twice = False
    # Of the candidates of four of `tests/zoo/small_nets.py` and of a transformer, compiled for a
    # v5e. What XLA keeps on the chip makes temporaries 0.2 to 1.2 times the predicted ones. The
    # seconds of chunks count as no less certain than others, so that they are not compiled for
    # that alone: many small chunks are predicted too fast. With 0.08 for `of_option` of
    # seconds a search over all candidates of five programs, compiled for a v5p, ends nearest to the
    # cheapest that fits: 0.2 % above it in the mean. With 0.06 it ends 0.4 % above it.
    peak_errors = dataclasses.replace(
        Compiler.peak_errors, of_all=0.5, of_family=0.3, of_option=0.45
    )
    time_errors = dataclasses.replace(
        Compiler.time_errors, of_family=0.06, of_option=0.08, chunks_are_alike=1.0
    )

    def array_bytes(self, aval: Any) -> int:
        """Return the bytes of an array, padded to tiles of 8 x 128 words."""
        size = super().array_bytes(aval)
        return max(size, _tiled_bytes(aval)) if size else 0

    def value_bytes(self, program: Program, var: Any) -> int:
        """Return the bytes of a value, half of them where only products read a float32 one.

        They multiply it as bfloat16, and the compiler writes it as such: with `jax.checkpoint`
        around each layer of an MLP of width 512, what is saved for a v5p or a v5e is of that type,
        under a `lax.scan` too, and of float32 where `jax.lax.Precision.HIGHEST` is asked for.
        """
        is_rounded = _dtype(var) == jnp.float32 and _is_multiplied_alone(program, var)
        return self.array_bytes(var.aval.update(dtype=jnp.bfloat16) if is_rounded else var.aval)

    def moved_bytes(self, aval: Any) -> float:
        """Return the bytes that are read or written where an array is, as far as time goes.

        Vector units have words of 32 bits. For a copy of bfloat16 the compiler states as many
        cycles as for one of float32, which is 0.7 to 0.8 of the published bandwidth: 12.0 and
        12.4 ps an entry for a v5e, 4.0 and 4.2 for a v5p, 6.0 for a v6e (2**26 entries).
        """
        words = -(-aval.dtype.itemsize // _WORD)
        return math.prod(aval.shape) * words * _WORD / _REACHED

    def held_table_bytes(self, aval: Any) -> float:
        """Return the bytes that are moved in the time that a region loses to a table it holds.

        A region that looks rows up again has their table behind a barrier, and the compiler moves
        fewer operands to the chip's memory. On a v5p plans of a decoder with ALiBi that look its
        embedding up once take 0.95 to 0.97 times the seconds of those of equal bytes that look it
        up again; on a v5e they take as long.
        """
        return min(self.moved_bytes(aval), _ON_CHIP)

    def fuses_derivative(self, eqn: Any) -> bool:
        """Return whether the derivative of a kernel of its own is none, but computed by readers.

        Where one entry of each row is taken, as the logit of a label, the cotangent is no `scatter`
        but a `select` by a comparison of indices, which whatever reads it computes.
        """
        return takes_one_of_each_row(eqn)

    def operand_bytes(self, program: Program, var: Any) -> int:
        """Return 0: a product computes its operands while it reads what they are made from."""
        return 0


def _is_multiplied_alone(program: Program, var: Any) -> bool:
    """Return whether a float32 value's readers are products without a precision, at least one.

    What reads it in another order is no reader, but whatever reads that; or nothing, if it is read
    as bfloat16.
    """
    forms = [var]
    for form in forms:
        readers = program.consumers.get(form, ())
        if not readers or readers[-1] == len(program.eqns):
            return False
        for eqn in (program.eqns[p] for p in readers):
            if facts_of(eqn).is_contraction:
                if not has_default_precision(eqn):
                    return False
            elif facts_of(eqn).view is View.NONE or len(eqn.outvars) > 1:
                return False
            elif _dtype(eqn.outvars[0]) == jnp.float32:
                forms.append(eqn.outvars[0])
            elif _dtype(eqn.outvars[0]) != jnp.bfloat16:
                return False
    return True


def _dtype(var: Any) -> Any:
    return getattr(var.aval, "dtype", None)


def _tiled_bytes(aval: Any) -> int:
    """Return the bytes of an array in tiles, its axes in the order that pads least.

    A tile has 128 lanes and 8 rows of 32 bits; shorter types are packed, 2 or 4 to a row. Where
    there are fewer rows than that, the tile is as low as the next power of two. XLA chooses which
    two axes are tiled.

    Source: "Tiled layout", XLA documentation, https://openxla.org/xla/tiled_layout.
    """
    shape, itemsize = aval.shape, aval.dtype.itemsize
    whole = math.prod(shape)
    if len(shape) < 2 or itemsize > _WORD:
        return whole * itemsize
    rows = _SUBLANES * _WORD // itemsize
    padded = min(
        whole // (shape[i] * shape[j]) * _tile_entries(shape[i], shape[j], rows)
        for i, j in itertools.permutations(range(len(shape)), 2)
    )
    return padded * itemsize


def _tile_entries(high: int, wide: int, rows: int) -> int:
    """Return the entries of a matrix whose axes are padded to tiles."""
    low = min(rows, 1 << (high - 1).bit_length())
    return -(-high // low) * low * (-(-wide // _LANES) * _LANES)


TPU = _Tpu()
