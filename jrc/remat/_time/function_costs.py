"""How long operations take on a processor without units for products, as multiples of a tanh.

Measured on a server's CPU (jax 0.12.0.1, float32, one core, an entry of an array that its caches
hold: a tanh takes 0.26 ns, a sum 0.03), and assumed of every device. A comparison of a sort takes
4 to 8 ns there. What has no row is arithmetic, and so are the operations of factorisations, Fourier
transforms and substitutions of its libraries: most take 0.2 to 2.6 times as long as assumed.

>>> function_cost("sin"), function_cost("add"), function_cost_of_opcode("sine")
(4.0, 0.125, 4.0)
>>> function_cost_of_opcode("dot") is None
True
"""

import math
import re
from collections.abc import Sequence

ARITHMETIC = 1 / 8
"""Of an addition, or another operation of arithmetic."""
IN_WINDOW = 1.0
"""Of an entry of a window: its loop is not vectorised."""

_SORT, _TOP_K = 25.0, 2.0
# By JAX's primitive.
_COSTS = {
    **dict.fromkeys(("tanh", "exp", "exp2", "log", "log2", "logistic", "erf", "erfc"), 1.0),
    **dict.fromkeys(("sqrt", "rsqrt"), 0.5),
    **dict.fromkeys(("expm1", "log1p"), 2.0),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), 3.0),
    **dict.fromkeys(("sin", "cos", "tan", "sinh", "cosh", "asinh", "acosh", "atanh"), 4.0),
    **dict.fromkeys(("erf_inv", "nextafter"), 5.0),
    **dict.fromkeys(("pow", "cbrt", "cumlogsumexp"), 10.0),
    **dict.fromkeys(("atan2", "atan", "asin", "acos", "lgamma", "digamma"), 20.0),
    "rem": 40.0,
    "sort": _SORT,
    "top_k": _TOP_K,
    "approx_top_k": _TOP_K,
}
_FAST_OF_WHOLE_NUMBERS = {"pow", "rem"}
# Those that HLO has an instruction for, by its opcode. The others are written out in it.
_OPCODES = {
    "tanh": "tanh",
    "exponential": "exp",
    "exponential-minus-one": "expm1",
    "log": "log",
    "log-plus-one": "log1p",
    "logistic": "logistic",
    "erf": "erf",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "cbrt": "cbrt",
    "sine": "sin",
    "cosine": "cos",
    "tan": "tan",
    "atan2": "atan2",
    "power": "pow",
    "remainder": "rem",
}
_LIBRARY = re.compile(r"(potrf|getrf|geqrf|orgqr|ungqr|trsm|syevd|heevd|gesdd|gesvd|geev)|^TopK$")
# Operations over those of m n min(m, n): Golub and Van Loan, "Matrix Computations", 4th ed.
_FACTORISATIONS = {
    "cholesky": 1 / 3,
    "potrf": 1 / 3,
    "getrf": 2 / 3,
    "geqrf": 4 / 3,
    "orgqr": 4 / 3,
    "ungqr": 4 / 3,
    "syevd": 9.0,
    "heevd": 9.0,
    "gesdd": 20.0,
    "gesvd": 20.0,
    "geev": 25.0,
}
_ROUTINES = {"sort", "topk", "fft", "triangular-solve", "cholesky"}


def function_cost(primitive: str, is_floating: bool = True) -> float:
    """Return how long an operation of a primitive takes: of a sort or a top-k a comparison.

    A remainder or a power of whole numbers is arithmetic.
    """
    if not is_floating and primitive in _FAST_OF_WHOLE_NUMBERS:
        return ARITHMETIC
    return _COSTS.get(primitive, ARITHMETIC)


def function_cost_of_opcode(opcode: str) -> float | None:
    """Return how long an entry of an elementwise function of HLO takes, `None` of all else."""
    return _COSTS[_OPCODES[opcode]] if opcode in _OPCODES else None


def routine_of(opcode: str, target: str = "") -> str:
    """Return the routine that an instruction is which is no pass over entries.

    Args:
        opcode: Its opcode.
        target: What it calls, if it is a custom call.

    Returns:
        A name that `routine_cost` takes; an empty string if it is none that is known.

    >>> routine_of("custom-call", "lapack_spotrf_ffi"), routine_of("fft"), routine_of("add")
    ('potrf', 'fft', '')
    """
    if opcode != "custom-call":
        return opcode if opcode in _ROUTINES else ""
    found = _LIBRARY.search(target)
    return found[0] if found else ""


def routine_cost(
    routine: str, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], along: int
) -> float:
    """Return how long a routine takes.

    Args:
        routine: What `routine_of` says.
        operands: The dimensions of its operands.
        results: Those of its results.
        along: How many entries are sorted, or transformed, together.

    >>> routine_cost("cholesky", [(2, 30, 30)], [(2, 30, 30)], 1) == 2 * 30**3 / 3 / 8
    True
    """
    if not operands or not operands[0]:
        return 0.0
    shape = operands[0]
    entries = math.prod(shape)
    match routine:
        case "sort":
            return _SORT * entries * math.log2(max(along, 2))
        case "TopK" | "topk":
            return _TOP_K * entries * math.log2(results[0][-1] + 1)
        case "fft":
            return ARITHMETIC * 5 * entries * math.log2(max(along, 2))
        case "triangular-solve" | "trsm" if len(operands) > 1:
            return ARITHMETIC * shape[-1] * math.prod(operands[1])
    share = _FACTORISATIONS.get(routine, 0.0)
    return ARITHMETIC * share * entries * min(shape[-2:]) if len(shape) > 1 else 0.0
