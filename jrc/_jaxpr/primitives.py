"""The table of primitives: all that the project knows of each, one row each.

A new primitive is one row here. What has no row is assumed to be dear: an elementwise pass of its
own kernel, whose derivative reads both its operands and its results.

>>> import jax, jax.numpy as jnp
>>> (eqn,) = jax.make_jaxpr(jnp.tanh)(1.0).eqns
>>> facts_of(eqn).derivative_reads
<Reads.RESULT: 2>
"""

import dataclasses
import enum
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jrc._jaxpr import axis_rules, sharding_axis_rules
from jrc._jaxpr import flop_rules as rules
from jrc._jaxpr.axes import reduced_axes
from jrc._jaxpr.axis_rules import AxisRule
from jrc._jaxpr.flop_rules import FlopRule


class Reads(enum.Flag):
    """What the derivative of a primitive reads, of floating operands and of results.

    `tests/jaxpr/test_primitives.py` compares every row that states it with JAX's own derivatives.
    A scalar index does not count. Where a plan is made JAX is asked instead, for each equation.
    """

    NOTHING = 0
    OPERANDS = 1
    RESULT = 2
    BOTH = 3


class Fusion(enum.Enum):
    """How XLA compiles a primitive.

    INSIDE: in the kernel of whatever reads the result, as often as it is read.
    LOOP: as a pass over its operands, which fuses with neighbours.
    NONE: as a kernel of its own, whose result lies in memory.
    """

    INSIDE = enum.auto()
    LOOP = enum.auto()
    NONE = enum.auto()


class View(enum.Enum):
    """Whether a result is its operand in another form.

    NONE: it is a new value.
    NAME: the operand under a name.
    ANNOTATION: the operand with another placement, sharding, precision or axis type.
    RESHAPE: the operand's entries in order, under another shape.
    COPY: a copy.
    REORDER: the operand's entries in another order, type or number.
    """

    NONE = enum.auto()
    NAME = enum.auto()
    ANNOTATION = enum.auto()
    RESHAPE = enum.auto()
    COPY = enum.auto()
    REORDER = enum.auto()


class Linear(enum.Enum):
    """In which operands a primitive is linear.

    NONE: in none, as far as is known.
    FIRST: in the first.
    ONE: in any one of them, the others fixed.
    ALL: in all of them together.
    """

    NONE = enum.auto()
    FIRST = enum.auto()
    ONE = enum.auto()
    ALL = enum.auto()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of one primitive.

    Attributes:
        flops: Its floating-point operations, by equation.
        derivative_reads: What its derivative reads.
        fusion: How XLA compiles it.
        view: Whether its result is its operand in another form.
        axes: The axes along which it computes each slice by itself, by equation.
        linear: In which operands it is linear, rounding apart.
        is_collective: Whether devices exchange data in it.
        makes_equal: Whether each result is an operand's, made equal on all devices along the axes.
        is_contraction: Whether it is a product of matrices or a convolution.
        is_reduction: Whether it makes one entry of all along some axes.
        is_cumulative: Whether it makes each entry of all before it along an axis.
        is_step: Whether its result is floating and constant, but where it jumps.
        is_cast: Whether it changes nothing but the mesh axes that a type varies over.
        is_region: Whether it is a `jax.checkpoint` region.
        hides_residuals: Whether its derivative saves values of a program inside, which have no
            name outside.
        is_closed: Whether no derivative can be put around its own: a `custom_vjp` has no `jvp`,
            and that of a `cond` has no transpose once it is batched.
        construct: What a user calls an equation with a program inside.
    """

    flops: FlopRule = rules.elementwise
    derivative_reads: Reads = Reads.BOTH
    fusion: Fusion = Fusion.NONE
    view: View = View.NONE
    axes: AxisRule = axis_rules.none
    linear: Linear = Linear.NONE
    is_collective: bool = False
    makes_equal: bool = False
    is_contraction: bool = False
    is_reduction: bool = False
    is_cumulative: bool = False
    is_step: bool = False
    is_cast: bool = False
    is_region: bool = False
    hides_residuals: bool = False
    is_closed: bool = False
    construct: str = ""

    @property
    def is_view(self) -> bool:
        """Whether its result has the bytes of its operand, under another name or shape."""
        return self.view in (View.NAME, View.ANNOTATION, View.RESHAPE, View.COPY)

    @property
    def moves_data(self) -> bool:
        """Whether it computes nothing: it moves data, names it, or makes it from nothing."""
        return self.flops is rules.no_flops


_TABLE: dict[str, Facts] = {}
_UNKNOWN = Facts()


def facts_of(eqn: JaxprEqn) -> Facts:
    """Return the row of an equation's primitive, or what is assumed of an unknown one.

    A collective over positional axes alone is none: `jax.vmap(..., axis_name=...)` makes those.
    """
    facts = _TABLE.get(primitive_name(eqn), _UNKNOWN)
    if facts.is_collective and _has_positional_axes_alone(eqn):
        return dataclasses.replace(facts, is_collective=False)
    return facts


def _has_positional_axes_alone(eqn: JaxprEqn) -> bool:
    axes = reduced_axes(eqn)
    return bool(axes) and all(isinstance(axis, int) for axis in axes)


def is_linear_in(eqn: JaxprEqn, reads: Sequence[bool], zeros: Sequence[bool] = ()) -> bool:
    """Return whether an equation is linear in some of its operands, the others fixed.

    Args:
        eqn: The equation.
        reads: Of each operand, whether it is one of these.
        zeros: Of each operand, whether it is zero; without it none is.
    """
    match facts_of(eqn).linear:
        case Linear.FIRST:
            return reads[0] and not any(reads[1:])
        case Linear.ONE:
            return sum(reads) == 1
        case Linear.ALL:
            return all(a or b for a, b in zip(reads, zeros or [False] * len(reads), strict=True))
    return False


def primitive_name(eqn: JaxprEqn) -> str:
    """Return the name of an equation's primitive; the inner one where `jax_remat3` wraps it."""
    inner = eqn.params.get("_prim")
    return eqn.primitive.name if inner is None else type(inner).__name__


def primitives_where(test) -> frozenset[str]:
    """Return the names of all primitives whose row passes a test."""
    return frozenset(name for name, facts in _TABLE.items() if test(facts))


def _row(names: str, **facts) -> None:
    """Add one row for each name."""
    for name in names.split():
        assert name not in _TABLE, name
        _TABLE[name] = Facts(**facts)


_free, _no_reads = {"flops": rules.no_flops}, {"derivative_reads": Reads.NOTHING}
_inside, _loop = {"fusion": Fusion.INSIDE}, {"fusion": Fusion.LOOP}
_operands, _result = {"derivative_reads": Reads.OPERANDS}, {"derivative_reads": Reads.RESULT}
_each, _axis = {"axes": axis_rules.elementwise}, {"axes": axis_rules.along_axis}

# Names: `mark` and `gate` are ours, `name` and `CheckpointName` JAX's (`jax_remat3` off and on).
_row("mark gate name CheckpointName", **_free, **_no_reads, **_inside, **_each, view=View.NAME)

# The same value, annotated.
_row("pvary", **_free, **_no_reads, **_inside, **_each, view=View.ANNOTATION, is_cast=True)
_row("reduce_precision", **_free, **_inside, **_each, view=View.ANNOTATION)
_row("device_put", **_free, view=View.ANNOTATION)
_row(
    "sharding_constraint",
    **_free,
    **_no_reads,
    view=View.ANNOTATION,
    axes=sharding_axis_rules.constraint,
)
_row("reshard", **_free, **_no_reads, view=View.ANNOTATION, axes=sharding_axis_rules.reshard)
_row("optimization_barrier", **_free, **_no_reads, view=View.ANNOTATION, axes=axis_rules.barrier)

# The same entries, moved.
_row(
    "reshape",
    **_free,
    **_no_reads,
    **_inside,
    view=View.RESHAPE,
    axes=axis_rules.reshape,
    linear=Linear.ALL,
)
_row(
    "squeeze",
    **_free,
    **_no_reads,
    **_inside,
    view=View.RESHAPE,
    axes=axis_rules.squeeze,
    linear=Linear.ALL,
)
_row("copy", **_free, **_no_reads, **_inside, **_each, view=View.COPY, linear=Linear.ALL)
_row("broadcast_in_dim", **_free, **_no_reads, **_inside, view=View.REORDER,
     axes=axis_rules.broadcast, linear=Linear.ALL)  # fmt: skip
_row("broadcast_to", **_free, **_no_reads, **_inside, view=View.REORDER)
_row("convert_element_type", **_free, **_no_reads, **_inside, **_each, view=View.REORDER)
_row("transpose", **_free, **_no_reads, **_inside, view=View.REORDER, axes=axis_rules.transpose,
     linear=Linear.ALL)  # fmt: skip
_row("rev", **_free, **_no_reads, **_inside, view=View.REORDER, axes=axis_rules.reverse,
     linear=Linear.ALL)  # fmt: skip
_row("slice", **_free, **_no_reads, **_inside, axes=axis_rules.part, linear=Linear.ALL)
_row("real imag stop_gradient", **_free, **_no_reads, **_inside, **_each)
_row("pad", **_free, **_no_reads, **_inside, axes=axis_rules.padding)
_row("split", **_free, **_no_reads, **_loop, **_axis)
_row("complex", **_free, **_no_reads, **_each)
_row("stack", **_free, **_no_reads, axes=axis_rules.stack)
_row("unstack", **_free, **_no_reads, axes=axis_rules.unstack)
_row("tile", **_free, **_no_reads, axes=axis_rules.tile)
_row("dynamic_update_slice", **_free, **_no_reads, axes=axis_rules.update)
_row("concatenate", **_free, **_no_reads, **_axis, linear=Linear.ALL)
_row("dynamic_slice", **_free, **_no_reads, axes=axis_rules.part, linear=Linear.FIRST)
_row("gather", **_free, **_operands, axes=axis_rules.gather, linear=Linear.FIRST)
_row("bitcast_convert_type", **_free, **_inside, axes=axis_rules.bitcast)
_row("scatter", **_free, axes=axis_rules.scatter)
_row("scatter-add scatter-mul scatter-min scatter-max", axes=axis_rules.scatter)
_row("get swap masked_load masked_swap", **_free)

# Made from nothing, or from a key.
_row("iota", **_free, **_inside, axes=axis_rules.iota)
_row(
    "empty empty2 axis_index platform_index program_id create_token debug_callback debug_print",
    **_free,
)
_row("random_bits", flops=rules.random_bits, axes=axis_rules.random_bits)
_row("threefry2x32", flops=rules.random_bits, **_each)
_row("random_wrap random_unwrap random_seed random_split random_fold_in random_clone", **_free)

# Elementwise arithmetic that XLA computes inside whatever reads it.
_row("add sub neg add_any", **_no_reads, **_inside, **_each, linear=Linear.ALL)
_row("mul", **_operands, **_inside, **_each, linear=Linear.ONE)
_row("select_n", **_operands, **_inside, **_each)
_row("div", **_inside, **_each, linear=Linear.FIRST)
_row("sign floor ceil round", **_inside, **_each, is_step=True)
_row("abs max min clamp integer_pow square is_finite reciprocal conj and or not xor "
     "eq ne lt le gt ge shift_left shift_right_logical shift_right_arithmetic "
     "clz population_count", **_inside, **_each)  # fmt: skip

# Elementwise functions and reductions: a pass over the operands.
_row("tanh logistic exp exp2 sqrt cbrt", **_result, **_loop, **_each)
_row("expm1 log log1p log2 sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc "
     "erf_inv rsqrt pow rem atan2 nextafter lgamma digamma one_minus_square", **_loop,
     **_each)  # fmt: skip
_row("reduce_sum", **_no_reads, **_loop, is_reduction=True, axes=axis_rules.sum_of_axes,
     linear=Linear.ALL)  # fmt: skip
_row("reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin", **_loop,
     is_reduction=True, axes=axis_rules.reduction)  # fmt: skip
_row("cumsum", **_no_reads, **_loop, **_axis, is_cumulative=True, linear=Linear.ALL)
_row("cumprod cummax cummin cumlogsumexp", **_loop, **_axis, is_cumulative=True)

# Kernels of their own.
_row("dot_general", flops=rules.dot_general, **_operands, is_contraction=True,
     axes=axis_rules.dot_general, linear=Linear.ONE)  # fmt: skip
_row("ragged_dot_general", flops=rules.ragged_dot_general, **_operands, is_contraction=True)
_row("conv_general_dilated", flops=rules.convolution, **_operands, is_contraction=True,
     axes=axis_rules.convolution, linear=Linear.ONE)  # fmt: skip
_row("sort", flops=rules.sort, **_axis)
_row("top_k", flops=rules.top_k, **_axis)
_row("approx_top_k", flops=rules.top_k)
_row("reduce_window", flops=rules.reduce_window)
_row("reduce_window_sum", flops=rules.reduce_window, axes=axis_rules.window)
_row("reduce_window_max reduce_window_min", flops=rules.reduce_window, axes=axis_rules.window)
_row("fft", flops=rules.fft, axes=axis_rules.fourier)
_row("cholesky", flops=rules.cholesky, axes=axis_rules.matrices)
_row("lu", flops=rules.lu, axes=axis_rules.matrices)
_row("qr", flops=rules.qr, axes=axis_rules.matrices)
_row("geqrf geqp3 householder_product", flops=rules.householder_product)
_row("triangular_solve", flops=rules.triangular_solve, axes=axis_rules.matrices)
_row("tridiagonal_solve", flops=rules.tridiagonal_solve)
_row("eigh", flops=rules.eigh, axes=axis_rules.matrices)
_row("eig schur", flops=rules.eig)
_row("hessenberg tridiagonal", flops=rules.hessenberg)
_row("svd", flops=rules.svd, axes=axis_rules.matrices)

# Collectives. Those that reduce count their additions.
_row("psum psum_invariant", **_no_reads, is_collective=True, makes_equal=True)
_row("reduce_scatter", **_no_reads, is_collective=True)
_row("all_gather all_gather_invariant", **_free, **_no_reads, is_collective=True,
     makes_equal=True)  # fmt: skip
_row("all_to_all ppermute", **_free, **_no_reads, is_collective=True)
_row("pmax pmin", is_collective=True, makes_equal=True)
_row("pbroadcast", **_free, is_collective=True, makes_equal=True)
_row("unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter", is_collective=True)
_row("all_gather_reduced ragged_all_to_all", **_free, is_collective=True)

# Constructs with programs inside.
_row("jit", construct="jax.jit")
_row("custom_jvp_call", **_loop, construct="a custom_jvp function")
_row("custom_vjp_call", hides_residuals=True, is_closed=True, construct="a custom_vjp function")
_row("scan", hides_residuals=True, construct="lax.scan")
_row("while", hides_residuals=True, construct="lax.while_loop")
_row("cond", hides_residuals=True, is_closed=True, construct="lax.cond")
_row("shard_map", hides_residuals=True, construct="jax.shard_map")
_row("remat2 RematTraced", hides_residuals=True, is_region=True,
     construct="a jax.checkpoint region")  # fmt: skip
