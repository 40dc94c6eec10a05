"""Floating-point operations of one equation, one rule for each kind of primitive.

A multiplication and an addition are two operations; a transcendental function is one an element.
Dense factorisations have the leading terms of Golub and Van Loan, "Matrix Computations", 4th ed.,
tables of chapters 4, 5, 7 and 8; a factorisation without vectors costs less than one with them.
Random bits count the operations of their generator, on whole numbers.

>>> import jax, jax.numpy as jnp
>>> (eqn,) = jax.make_jaxpr(jax.lax.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
>>> dot_general(eqn)
48
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jrc._jaxpr.axes import dimension_numbers, operand_axes
from jrc._jaxpr.random_bits import is_threefry

_THREEFRY = 20 * 5 + 6 * 2

FlopRule = Callable[[JaxprEqn], int]


def no_flops(_: JaxprEqn) -> int:
    """Return 0: the primitive only moves data, names it, or makes it from nothing."""
    return 0


def elementwise(eqn: JaxprEqn) -> int:
    """Return one operation an element of the larger side: reductions and scatters as well."""
    return max([_size(atom) for atom in (*eqn.invars, *eqn.outvars)], default=0)


def random_bits(eqn: JaxprEqn) -> int:
    """Return the operations of Threefry-2x32, with half of its bits unused; else one an entry.

    It has 20 rounds of an addition, a rotation and an exclusive or, and adds words of the key to
    both halves six times.
    """
    (bits, *_) = eqn.outvars
    is_dear = eqn.primitive.name == "threefry2x32" or is_threefry(eqn)
    return _size(bits) * (_THREEFRY if is_dear else 1)


def dot_general(eqn: JaxprEqn) -> int:
    """Return the operations of a batched matrix product."""
    shape = _shape(eqn.invars[0])
    contracted = operand_axes(eqn, 0).contracted
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[axis] for axis in contracted)


def ragged_dot_general(eqn: JaxprEqn) -> int:
    """Return the operations of a product in which each row meets the matrix of its group.

    The groups share the rows (or contracted entries) of the left operand, so that their number
    does not enter: (m, k) x (g, k, n) costs 2 m k n, and (m, k) x (m, n) in g groups the same.
    """
    numbers = dimension_numbers(eqn)
    (contracted, other), (batch, other_batch) = numbers.dot_dimension_numbers
    left, right = map(_shape, eqn.invars[:2])
    groups = set(numbers.rhs_group_dimensions)
    used = {*other, *other_batch, *groups}
    columns = math.prod(n for axis, n in enumerate(right) if axis not in used)
    return 2 * math.prod(left) * columns


def convolution(eqn: JaxprEqn) -> int:
    """Return the operations of a convolution, without products with zeros that dilation inserts.

    `lhs_dilation` writes zeros between the entries of the input (a transposed convolution, or the
    gradient of a strided one): of the kernel's taps only one in `lhs_dilation` meets an entry.
    """
    numbers = dimension_numbers(eqn)
    kernel = _shape(eqn.invars[1])
    features = kernel[numbers.rhs_spec[0]]
    taps = math.prod(kernel) // max(features, 1)
    dilated = math.prod(eqn.params.get("lhs_dilation") or (1,))
    return -(-2 * _size(eqn.outvars[0]) * taps // dilated)


def sort(eqn: JaxprEqn) -> int:
    """Return n log2 n comparisons for each sorted row."""
    length = _shape(eqn.invars[0])[eqn.params["dimension"]]
    return _size(eqn.invars[0]) * _log2(length)


def top_k(eqn: JaxprEqn) -> int:
    """Return n log2 k comparisons for each row."""
    return _size(eqn.invars[0]) * _log2(_shape(eqn.outvars[0])[-1] + 1)


def reduce_window(eqn: JaxprEqn) -> int:
    """Return one operation for each entry of each window."""
    return _size(eqn.outvars[0]) * math.prod(eqn.params.get("window_dimensions", ()))


def fft(eqn: JaxprEqn) -> int:
    """Return 5 n log2 n for each complex transform of n points, half of it for a real one."""
    lengths = eqn.params["fft_lengths"]
    points, shape = math.prod(lengths), _shape(eqn.invars[0])
    rows = math.prod(shape[: len(shape) - len(lengths)])
    is_real = not (_is_complex(eqn.invars[0]) and _is_complex(eqn.outvars[0]))
    return rows * 5 * points * _log2(points) // (2 if is_real else 1)


def cholesky(eqn: JaxprEqn) -> int:
    """Return n^3 / 3 for each matrix."""
    batch, rows, _ = _matrices(eqn.invars[0])
    return _complex(eqn) * batch * rows**3 // 3


def lu(eqn: JaxprEqn) -> int:
    """Return 2 m n k - (m + n) k^2 + 2 k^3 / 3 for each matrix, k the smaller side."""
    batch, m, n = _matrices(eqn.invars[0])
    k = min(m, n)
    return _complex(eqn) * batch * (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3


def qr(eqn: JaxprEqn) -> int:
    """Return the operations of the factorisation and of forming Q, for each matrix."""
    batch, m, n = _matrices(eqn.invars[0])
    columns = _shape(eqn.outvars[0])[-1]
    once = _reflections(m, n, min(m, n)) + _reflections(m, columns, min(m, n))
    return _complex(eqn) * batch * once


def householder_product(eqn: JaxprEqn) -> int:
    """Return the operations to apply, or to form Q of, k reflections, k the smaller side."""
    batch, m, n = _matrices(eqn.invars[0])
    return _complex(eqn) * batch * _reflections(m, n, min(m, n))


def triangular_solve(eqn: JaxprEqn) -> int:
    """Return n^2 for each right-hand side, n the side of the triangle."""
    _, rows, _ = _matrices(eqn.invars[0])
    return _complex(eqn) * rows * _size(eqn.outvars[0])


def eigh(eqn: JaxprEqn) -> int:
    """Return 9 n^3 for each symmetric matrix."""
    batch, rows, _ = _matrices(eqn.invars[0])
    return _complex(eqn) * 9 * batch * rows**3


def eig(eqn: JaxprEqn) -> int:
    """Return 25 n^3 for each matrix with eigenvectors or a Schur form, 10 n^3 for values alone."""
    batch, rows, _ = _matrices(eqn.invars[0])
    vectors = len(eqn.outvars) > 1
    return _complex(eqn) * (25 if vectors else 10) * batch * rows**3


def hessenberg(eqn: JaxprEqn) -> int:
    """Return 10 n^3 / 3 for each matrix; a symmetric one to tridiagonal form takes 4 n^3 / 3."""
    batch, rows, _ = _matrices(eqn.invars[0])
    factor = 4 if eqn.primitive.name == "tridiagonal" else 10
    return _complex(eqn) * factor * batch * rows**3 // 3


def svd(eqn: JaxprEqn) -> int:
    """Return 4 m^2 n + 8 m n^2 + 9 n^3 with vectors, 4 m n^2 - 4 n^3 / 3 without, n <= m."""
    batch, *sides = _matrices(eqn.invars[0])
    n, m = sorted(sides)
    if len(eqn.outvars) > 1:
        return _complex(eqn) * batch * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3)
    return _complex(eqn) * batch * (12 * m * n**2 - 4 * n**3) // 3


def tridiagonal_solve(eqn: JaxprEqn) -> int:
    """Return 8 operations for each entry of the right-hand sides."""
    return 8 * _size(eqn.outvars[0])


def _reflections(m: int, n: int, k: int) -> int:
    """4 m n k - 2 (m + n) k^2 + 4 k^3 / 3: k Householder reflections of an m x n matrix."""
    return (12 * m * n * k - 6 * (m + n) * k**2 + 4 * k**3) // 3


def _matrices(atom: Any) -> tuple[int, int, int]:
    """How many matrices an operand holds, and their rows and columns."""
    *batch, rows, columns = _shape(atom)
    return math.prod(batch), rows, columns


def _complex(eqn: JaxprEqn) -> int:
    """Four for complex entries, whose product and sum are four of each, roughly; else one."""
    return 4 if _is_complex(eqn.invars[0]) else 1


def _is_complex(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.complexfloating)


def _log2(n: int) -> int:
    return max(1, math.ceil(math.log2(max(n, 2))))


def _size(atom: Any) -> int:
    return math.prod(_shape(atom))


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
