"""A program as a planner sees it: what each equation costs, and what its derivative reads.

Nothing here knows a table of derivatives: JAX is asked, once for every kind of equation.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    INPUT,
    Program,
    acts,
    equation_flops,
    evaluate,
    inner_programs,
    is_variable,
    nbytes,
    primitive_name,
    tag_of,
)
from jrc._tree import is_floating
from jrc.remat._hold import derivative_reads
from jrc.remat._region import is_closed
from jrc.remat._say import COLLECTIVES, KEPT

# Operators whose results XLA makes inside of whatever reads them, as often as they are read.
_FUSED = frozenset(
    "add sub mul div neg sign abs floor ceil round max min clamp select_n and or not xor eq ne lt "
    "le gt ge convert_element_type integer_pow square is_finite add_any broadcast_in_dim reshape "
    "squeeze expand_dims transpose slice rev pad iota mark gate name CheckpointName copy "
    "stop_gradient real imag reduce_precision shift_left shift_right_logical "
    "shift_right_arithmetic".split()
)
# Operators that take a pass over their arguments, and fuse with what stands next to them.
_LIGHT = _FUSED | frozenset(
    "exp exp2 expm1 log log1p tanh logistic sin cos tan erf erfc erf_inv sqrt rsqrt cbrt pow rem "
    "atan2 nextafter reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax "
    "argmin custom_jvp_call lgamma digamma cumsum".split()
)
_REGIONS = frozenset({"remat2", "checkpoint", "RematTraced"})
_CONSTRUCTS = _REGIONS | {"scan", "while", "cond", "shard_map", "custom_vjp_call", "pmap"}


SMALL = 24
"""Up to so many values every one of them may be kept."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One equation.

    Attributes:
        position: Its position in the program.
        reads: The variables that it is given and that equations make, as numbers.
        makes: The variables that it makes, as numbers.
        needs: Those of both that its derivative reads.
        flops: Floating-point operations of one run.
        opaque: Bytes that its derivative keeps of what happens inside, which have no name; 0 if
            nothing does, `None` if it is not differentiated from the inside.
        moves: Whether it is differentiated.
        stays: Whether it must not be run again: it acts on the world, or sends over the network.
        acts: Whether it acts on the world, so that no region may hold it.
        back: Bytes of cotangents that are there while it is differentiated.
        operands: What its derivative reads and XLA would otherwise fuse away, as numbers, each
            with the bytes that it then takes.
    """

    position: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    needs: frozenset[int]
    flops: int
    opaque: int | None
    moves: bool
    stays: bool
    acts: bool
    back: int
    operands: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A program's live equations in the order in which they are run.

    Attributes:
        nodes: The equations.
        sizes: Bytes of every variable that an equation makes.
        remade: Bytes that it takes when it is made again, until the equation that makes it has
            been differentiated; none if XLA fuses it away, or if only re-running reads it.
        passing: Bytes that it takes for a moment when it is made again.
        may_save: Whether a plan may keep it; what something next to it stands for is left out.
        names: Where every variable comes from: its equation and which result it is.
    """

    nodes: tuple[Node, ...]
    sizes: tuple[int, ...]
    remade: tuple[int, ...]
    passing: tuple[int, ...]
    may_save: tuple[bool, ...]
    names: tuple[tuple[int, int], ...]


def graph_of(program: Program, moves: set[Any], carried: Sequence[Any] = ()) -> Graph:
    """The graph of a program.

    Args:
        program: The program.
        moves: The variables through which derivatives flow.
        carried: Inputs that are not there in the backward pass unless they are kept: what goes
            around a loop.
    """
    eqns = program.eqns
    order = scheduled(program)
    made = [*carried, *(v for p in order for v in eqns[p].outvars)]
    number = {var: k for k, var in enumerate(made)}
    reads = _Reads()
    back = _cotangents(program, order, moves)
    fused = [program.producer[v] != INPUT and _is_fused(eqns[program.producer[v]]) for v in made]
    nodes = [_arriving(number, carried)] if carried else []
    for p, cotangents in zip(order, back, strict=True):
        eqn, differentiated = eqns[p], not moves.isdisjoint(eqns[p].outvars)
        needs, opaque = reads.of(program, p, moves) if differentiated else ((), None)
        needed = [number[v] for v in needs if v in number]
        nodes.append(
            Node(
                position=p,
                reads=tuple(number[v] for v in program.reads(p) if v in number),
                makes=tuple(number[v] for v in eqn.outvars),
                needs=frozenset(needed),
                flops=equation_flops(eqn),
                opaque=opaque,
                moves=differentiated,
                stays=stays(eqn),
                acts=acts(eqn),
                back=cotangents,
                operands=tuple(
                    (v, _operand_bytes(program, made[v]))
                    for v in needed
                    if fused[v] and _is_heavy(eqn)
                ),
            )
        )
    sizes = tuple(nbytes(v.aval) for v in made)
    lasts = _lasting(nodes, fused)
    kinds = list(zip(sizes, fused, lasts, strict=True))
    return Graph(
        nodes=tuple(nodes),
        sizes=sizes,
        remade=tuple(size if lasts and not fused else 0 for size, fused, lasts in kinds),
        passing=tuple(0 if lasts or fused else size for size, fused, lasts in kinds),
        may_save=tuple(worth_saving(nodes, sizes, fused)),
        names=tuple(_name(program, v) for v in made),
    )


def _arriving(number: Mapping[Any, int], carried: Sequence[Any]) -> Node:
    """What goes around a loop, as if an equation made it that must not be run again."""
    return Node(
        position=INPUT, reads=(), makes=tuple(number[v] for v in carried), needs=frozenset(),
        flops=0, opaque=None, moves=False, stays=True, acts=False, back=0, operands=(),
    )  # fmt: skip


def _operand_bytes(program: Program, var: Any) -> int:
    """Bytes of a value that XLA makes for a product; on CPU also of what was broadcast for it."""
    eqn = program.eqns[program.producer[var]]
    size = nbytes(var.aval)
    shapes = (getattr(x.aval, "shape", ()) for x in eqn.invars)
    stretched = any(shape and math.prod(shape) < math.prod(var.aval.shape) for shape in shapes)
    return size * (2 if stretched and jax.default_backend() == "cpu" else 1)


def _lasting(nodes: Sequence[Node], fused: Sequence[bool]) -> list[bool]:
    """Which values a derivative reads, as they are or through what XLA fuses with it."""
    lasting = [False] * len(fused)
    for node in reversed(nodes):
        for v in node.needs:
            lasting[v] = True
        if any(lasting[v] and fused[v] for v in node.makes):
            for v in node.reads:
                lasting[v] = True
    return lasting


def stays(eqn: Any) -> bool:
    """Whether an equation must not be run twice."""
    inner = (each for jaxpr in inner_programs(eqn) for each in jaxpr.eqns)
    sends = primitive_name(eqn) in COLLECTIVES or tag_of(eqn) == KEPT
    return sends or acts(eqn) or any(stays(each) for each in inner)


def is_construct(eqn: Any) -> bool:
    """Whether the derivative of an equation keeps things of its inside that have no name."""
    return primitive_name(eqn) in _CONSTRUCTS or is_closed(eqn)


def moved(program: Program, inputs: Iterable[Any], wanted: Iterable[Any]) -> set[Any]:
    """The variables on the way from these inputs to these results, as far as a derivative goes."""
    moving, flowing = set(inputs), {x for x in wanted if is_variable(x)}
    through = [eqn for eqn in program.eqns if not _stops(eqn)]
    for eqn in through:
        if any(is_variable(x) and x in moving for x in eqn.invars):
            moving.update(v for v in eqn.outvars if is_floating(v.aval))
    for eqn in reversed(through):
        if not flowing.isdisjoint(eqn.outvars):
            flowing.update(x for x in eqn.invars if is_variable(x))
    return moving & flowing


def _stops(eqn: Any) -> bool:
    return primitive_name(eqn) == "stop_gradient" or eqn.params.get("stop") is True


def scheduled(program: Program) -> list[int]:
    """The live equations in program order; what is made of inputs alone, just before it is read.

    A table or a cast of a parameter that stands far from its reader would be kept for long.
    """
    live = program.live()
    light: set[int] = set()
    for p, eqn in enumerate(program.eqns):
        made = [program.producer[v] for v in program.reads(p)]
        plain = not inner_programs(eqn) and not acts(eqn) and primitive_name(eqn) in _FUSED
        if live[p] and plain and all(q == INPUT or q in light for q in made):
            light.add(p)
    order, done = [], set()

    def place(p: int) -> None:
        for q in sorted({program.producer[v] for v in program.reads(p)}):
            if q in light and q not in done:
                place(q)
        done.add(p)
        order.append(p)

    for p in range(len(program.eqns)):
        if live[p] and p not in light:
            place(p)
    for p in sorted(light - done):
        place(p)
    return order


class _Reads:
    """What derivatives read, asked once for each kind of equation."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[frozenset[int], frozenset[int], int | None]] = {}

    def of(self, program: Program, p: int, moves: set[Any]) -> tuple[list[Any], int | None]:
        """The variables that the derivative of equation `p` reads; bytes that it keeps inside."""
        eqn, given = program.eqns[p], program.reads(p)
        moving = [i for i, v in enumerate(given) if v in moves]
        key = _kind(eqn, given, moving)
        if key not in self._known:
            self._known[key] = _asked(program, p, moving)
        inputs, results, opaque = self._known[key]
        needs = [v for i, v in enumerate(given) if i in inputs]
        return needs + [v for i, v in enumerate(eqn.outvars) if i in results], opaque


def _kind(eqn: Any, given: Sequence[Any], moving: Sequence[int]) -> Any:
    at = tuple(given.index(x) if is_variable(x) else repr(x.val) for x in eqn.invars)
    avals = tuple(str(x.aval) for x in (*eqn.invars, *eqn.outvars))
    inner = inner_programs(eqn)
    params = id(eqn) if inner else repr(sorted(eqn.params.items(), key=lambda item: item[0]))
    return primitive_name(eqn), avals, at, tuple(moving), params


def _asked(program: Program, p: int, moving: Sequence[int]) -> Any:
    eqn, given = program.eqns[p], program.reads(p)
    run = evaluate(program.cut([p], eqn.outvars))
    avals = [v.aval for v in given]
    everything = frozenset(range(len(given)))
    if is_construct(eqn):
        return everything, frozenset(), residual_bytes(run, avals, moving)
    try:
        return *derivative_reads(run, avals, moving), None
    except (NotImplementedError, TypeError, ValueError):
        return everything, frozenset(range(len(eqn.outvars))), None


def residual_bytes(run: Callable[..., Any], avals: Sequence[Any], moving: Sequence[int]) -> int:
    """Bytes that the derivative of a function keeps besides its inputs and results."""

    def kept(*inputs: Any) -> Any:
        def at(*moved: Any) -> Any:
            new = dict(zip(moving, moved, strict=True))
            return list(run(*(new.get(i, x) for i, x in enumerate(inputs))))

        results, pull = jax.vjp(at, *(inputs[i] for i in moving))
        return jax.tree.leaves(pull), results

    jaxpr, shape = jax.make_jaxpr(kept, return_shape=True)(*avals)
    count = len(jax.tree.leaves(shape[0]))
    given = {*jaxpr.constvars, *jaxpr.invars, *filter(is_variable, jaxpr.outvars[count:])}
    inside = {x for x in jaxpr.outvars[:count] if is_variable(x) and x not in given}
    return sum(nbytes(x.aval) for x in inside)


def _cotangents(program: Program, order: Sequence[int], moves: set[Any]) -> list[int]:
    """Bytes of cotangents that are there while each equation is differentiated.

    That of a value comes with its last reader and goes with its maker; that of an input stays.
    Between operators that XLA fuses there is none. XLA lends the room of results that are not
    there yet to temporaries, which is why it matters when a gradient is made.
    """
    at = {p: k for k, p in enumerate(order)}
    heavy = list(itertools.accumulate((_is_heavy(program.eqns[p]) for p in order), initial=0))
    change = [0] * (len(order) + 1)
    for var in moves.intersection(program.jaxpr.invars):
        readers = [at[q] for q in program.consumers.get(var, ()) if q in at]
        change[0] += nbytes(var.aval)
        change[max(readers, default=0) + 1] -= nbytes(var.aval)
    for p in order:
        for var in program.eqns[p].outvars:
            readers = [at[q] for q in program.consumers.get(var, ()) if q in at]
            # A reader that is heavy, or something heavy between two readers.
            if var in moves and readers and heavy[max(readers) + 1] > heavy[min(readers)]:
                change[at[p]] += nbytes(var.aval)
                change[max(readers) + 1] -= nbytes(var.aval)
    return list(itertools.accumulate(change))[:-1]


def _is_heavy(eqn: Any) -> bool:
    return primitive_name(eqn) not in _LIGHT


def _is_fused(eqn: Any) -> bool:
    return primitive_name(eqn) in _FUSED


def _name(program: Program, var: Any) -> tuple[int, int]:
    p = program.producer[var]
    if p == INPUT:
        return p, list(program.jaxpr.invars).index(var)
    return p, list(program.eqns[p].outvars).index(var)


def worth_saving(nodes: Sequence[Node], sizes: Sequence[int], fused: Sequence[bool]) -> list[bool]:
    """Which values a plan may keep.

    In a small program all of them. In a large one, of a value and what is made of it by and by
    without any work, the last; and what is smaller than all that it is made of.
    """
    if len(sizes) <= SMALL:
        return [True] * len(sizes)
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for v in node.reads:
            readers.setdefault(v, []).append(node)

    def last(v: int) -> int:
        while len(readers.get(v, ())) == 1:
            (node,) = readers[v]
            light = len(node.makes) == 1 and fused[node.makes[0]] and v not in node.needs
            if not light or sizes[node.makes[0]] > sizes[v]:
                break
            (v,) = node.makes
        return v

    worth = [False] * len(sizes)
    roots: dict[int, frozenset[int]] = {}
    for node in nodes:
        made_of = frozenset().union(*(roots[v] for v in node.reads))
        for v in node.makes:
            if not fused[v]:
                worth[last(v)] = True
            elif not worth[v] and made_of:
                worth[v] = last(v) == v and sizes[v] <= 0.75 * sum(sizes[r] for r in made_of)
            roots[v] = frozenset({v}) if worth[v] or not fused[v] else made_of
    for node in nodes:
        if node.opaque is not None:
            # Outside of all regions its derivative needs them kept.
            for v in node.reads:
                worth[v] = True
    for v in _past_walls(nodes, readers):
        worth[v] = True
    return worth


def _past_walls(nodes: Sequence[Node], readers: Mapping[int, Sequence[Node]]) -> set[int]:
    """What is read at or behind a construct that must not be run again, and is made before it.

    No stretch goes across such a construct, so that there is no making these again.
    """
    at = {v: k for k, node in enumerate(nodes) for v in node.makes}
    walls = [k for k, node in enumerate(nodes) if node.acts or (node.opaque and node.stays)]
    order = {id(node): k for k, node in enumerate(nodes)}
    return {
        v
        for v, reading in readers.items()
        if any(at[v] < k <= max(order[id(node)] for node in reading) for k in walls)
    }
