"""Building the cost graph of a program."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrc._jaxpr import (
    INPUT,
    Program,
    View,
    facts_of,
    has_effects,
    inline_marked,
    inner_program,
    is_variable,
    loop_parts,
    nbytes,
    primitive_name,
    tangents_of,
    walk,
)
from jrc._mesh_axes import is_on_automatic_axes
from jrc.remat._planner.costs import memory_model
from jrc.remat._planner.costs.compilers import CPU, Compiler
from jrc.remat._planner.costs.constraints import must_run_once
from jrc.remat._planner.costs.cost_graph import CostGraph, CostNode
from jrc.remat._planner.costs.cost_unit import FLOPS, CostUnit
from jrc.remat._planner.costs.derivative_reads import DerivativeReads, Needs
from jrc.remat._planner.costs.lookups import is_lookup
from jrc.remat._planner.costs.save_candidates import save_candidates
from jrc.remat._planner.costs.working_bytes import working_bytes
from jrc.remat._planner.program.schedule import schedule
from jrc.remat._planner.settings import SETTINGS


@dataclasses.dataclass(frozen=True)
class _Numbered:
    """A program whose variables have numbers.

    Attributes:
        program: The program.
        active: The variables that a derivative flows through.
        steps: By position in the program, the position in the jaxpr that it was made of.
        made: The variables that a plan decides on, in the order of their numbers.
        number: The number of each.
        there: Variables that no plan decides on, because any reader computes them.
        fused: Whether XLA fuses each into its readers.
        compiler: What is assumed of the platform's compiler.
    """

    program: Program
    active: set[Any]
    steps: Mapping[int, int]
    made: Sequence[Any]
    number: Mapping[Any, int]
    there: set[Any]
    fused: Sequence[bool]
    compiler: Compiler

    def of(self, variables: Iterable[Any]) -> list[int]:
        """Return the numbers of those of these variables that have one and are not there anyway."""
        return [self.number[v] for v in variables if v in self.number and v not in self.there]


def build_cost_graph(
    program: Program,
    active: set[Any],
    carried: Sequence[Any] = (),
    compiler: Compiler = CPU,
    results: Sequence[int] = (),
    unit: CostUnit = FLOPS,
    in_loop: bool = False,
) -> CostGraph:
    """Return the cost graph of a program.

    Args:
        program: The program.
        active: The variables that a derivative flows through.
        carried: Inputs that are not there in the backward pass unless they are saved: the carries
            of a loop.
        compiler: What is assumed of the platform's compiler.
        results: Bytes of each result in whose memory saved values may lie.
        unit: What costs are counted in.
        in_loop: Whether it is the body of a loop, of which each step saves its values.
    """
    eqns, steps = program.eqns, {p: k for k, p in enumerate(program.steps)}
    order = [p for p in schedule(program, compiler) if p in steps]
    made = [*carried, *(v for p in order for v in eqns[p].outvars)]
    number = {var: k for k, var in enumerate(made)}
    fused = [memory_model.is_fused_variable(program, v, compiler) for v in made]
    there = _always_there(program, order, active, carried, compiler)
    numbered = _Numbered(program, active, steps, made, number, there, fused, compiler)
    reads = DerivativeReads()
    carries = CostNode(INPUT, makes=tuple(number[v] for v in carried), runs_once=True)
    nodes = [carries] if carried else []
    cotangents = memory_model.cotangent_bytes(program, order, active, compiler)
    for p, size in zip(order, cotangents, strict=True):
        held = 0 if in_loop else compiler.held_for_region(eqns[p])
        node = _node(numbered, p, reads, size, sum(results), held, unit)
        if compiler.makes_loops_early and not in_loop and node.active:
            early, again = _early_bytes(program, eqns[p], active)
            node = dataclasses.replace(node, early_bytes=early, early_again_bytes=again)
        if not in_loop and is_lookup(program, eqns[p]):
            held = unit.of_bytes(compiler.held_table_bytes(eqns[p].invars[0].aval))
            node = dataclasses.replace(node, cost=node.cost + held, table_cost=held)
        nodes.append(node)
    derived = {v for node in nodes for v in node.late_results}
    sizes = tuple(
        compiler.array_bytes(v.aval) if k in derived else compiler.value_bytes(program, v)
        for k, v in enumerate(made)
    )
    late = memory_model.values_read_late(nodes, fused)
    read_late = {v for v, is_late in zip(made, late, strict=True) if is_late}
    passing = memory_model.passing_bytes(program, order, active, read_late, compiler)
    written = {v: size for node in nodes for v, size in node.operands if size}
    nodes = [
        _with_neighbours(node, size, written, unit)
        for node, size in zip(nodes, [0] * (len(nodes) - len(order)) + passing, strict=True)
    ]
    facts = list(zip(sizes, fused, late, strict=True))
    candidates = save_candidates(nodes, sizes, fused, compiler)
    outputs = filter(is_variable, map(program.source, program.jaxpr.outvars))
    returned = [number[v] for v in outputs if v in number]
    wide = _wide_reads(nodes, sizes, fused, returned)
    return CostGraph(
        nodes=tuple(nodes),
        sizes=sizes,
        recomputed_bytes=tuple(
            size if is_late and not is_fused else 0 for size, is_fused, is_late in facts
        ),
        passing_bytes=tuple(
            0 if is_late or is_fused else size for size, is_fused, is_late in facts
        ),
        may_save=tuple(
            may and not is_on_automatic_axes(var.aval)
            for may, var in zip(candidates.may_save, made, strict=True)
        ),
        saving_costs=tuple(
            _cost_of_saving(var.aval, v not in candidates.written, wide[v], in_loop, compiler, unit)
            for v, var in enumerate(made)
        ),
        names=tuple(_name(program, v, steps) for v in made),
        results=tuple(results),
        fuses_passes=compiler.fuses_passes,
        without_barrier=compiler.without_barrier,
        in_order=compiler.in_order,
        unit=unit,
    )


def _cost_of_saving(
    aval: Any, is_new: bool, wide: int, in_loop: bool, compiler: Compiler, unit: CostUnit
) -> int:
    """What it costs to save a value: to write it if it is new, and to stack it in a loop.

    The kernel that computes a new value writes it beside its result. Some kernels reduce each row
    and read it again, for a wide result; such a kernel becomes two if the reduced rows are saved.
    """
    if not compiler.fuses_passes:
        return 0
    stacked = unit.of_stacked([(aval, 1)]) if in_loop else 0
    size = compiler.moved_bytes(aval)
    if is_new and wide and compiler.reads_rows_twice:
        return stacked + unit.of_written(size + wide)
    return stacked or (unit.of_bytes(size) if is_new else 0)


def _wide_reads(
    nodes: Sequence[CostNode],
    sizes: Sequence[int],
    fused: Sequence[bool],
    returned: Sequence[int],
) -> list[int]:
    """Return for each value the bytes of the widest one that fused equations compute from it.

    Those count that a kernel reads or the program returns; 0 where none is wider than the value.
    """
    widest = [0] * len(sizes)
    for v in returned:
        widest[v] = sizes[v]
    for node in reversed(nodes):
        is_fused = all(fused[v] for v in node.makes)
        reached = max((widest[v] for v in node.makes), default=0) if is_fused else 0
        for v in node.reads:
            is_read = fused[v] and not is_fused
            widest[v] = max(widest[v], reached, sizes[v] if is_read else 0)
    return [wide if wide > size else 0 for wide, size in zip(widest, sizes, strict=True)]


def _early_bytes(program: Program, eqn: Any, active: set[Any]) -> tuple[int, int]:
    """Bytes that the backward loop of a loop writes into, and the loop itself.

    These are gradients of what all steps read and of what they go over, and stacked results.
    Gradients of the program's inputs are results, which are there from the start anyway.
    """
    if primitive_name(eqn) != "scan":
        return 0, 0
    consts, carried = loop_parts(eqn)
    read = [*eqn.invars[:consts], *eqn.invars[consts + carried :]]
    made = [x for x in read if is_variable(x) and x in active and program.producer[x] != INPUT]
    stacked = eqn.outvars[carried:]
    return sum(nbytes(x.aval) for x in made), sum(nbytes(x.aval) for x in stacked)


def _beside_derivative(eqn: Any, compiler: Compiler) -> int:
    """Bytes that a function with a derivative of its own needs while that is computed in a loop.

    A sum over chunks computes its gradient beside its value. Then all that is saved is there.
    """
    if primitive_name(eqn) != "custom_jvp_call":
        return 0
    loops = any(primitive_name(each) == "scan" for each, _ in walk(inner_program(eqn)))
    if not loops:
        return 0
    derivative = Program(inline_marked(tangents_of(eqn), lambda _: True))
    return working_bytes(derivative, compiler)


def _node(
    numbered: _Numbered,
    p: int,
    reads: DerivativeReads,
    cotangents: int,
    results: int,
    held: int,
    unit: CostUnit,
) -> CostNode:
    """The node of an equation.

    Args:
        numbered: The program.
        p: The position of the equation.
        reads: What derivatives of equations read.
        cotangents: Bytes of cotangents while its derivative runs.
        results: Bytes of results in whose memory saved values may lie.
        held: Bytes that a region with it holds.
        unit: What costs are counted in.
    """
    program, active, compiler = numbered.program, numbered.active, numbered.compiler
    eqn = program.eqns[p]
    is_active = not active.isdisjoint(eqn.outvars)
    needs = reads.of(program, p, active) if is_active else Needs()
    inner_bytes = needs.inner_bytes
    needed = numbered.of(filter(is_variable, map(program.source, needs.variables)))
    own_kernel = memory_model.has_own_kernel(eqn)
    working = _beside_derivative(eqn, compiler) if is_active else 0
    return CostNode(
        position=numbered.steps[p],
        reads=tuple(numbered.of(program.sources(p))),
        makes=tuple(numbered.number[v] for v in eqn.outvars),
        derivative_reads=frozenset(needed),
        cost=unit.of(eqn),
        inner_bytes=0 if inner_bytes is None and held and is_active else inner_bytes,
        inner_cost=unit.of_stacked(needs.stacked),
        held_bytes=held if is_active else 0,
        active=is_active,
        runs_once=must_run_once(eqn),
        has_effects=has_effects(eqn),
        momentary_bytes=cotangents + working if is_active else 0,
        working_bytes=working,
        gradient_bytes=min(inner_bytes or 0, working, results),
        operands=tuple(
            (v, compiler.operand_bytes(program, numbered.made[v]))
            for v in dict.fromkeys(needed)
            if numbered.fused[v] and own_kernel and not is_input(program, numbered.made[v])
        ),
    )


def is_input(program: Program, var: Any) -> bool:
    """Return whether a value is an input in another shape, which is there and not written."""
    while is_variable(var) and (p := program.producer[var]) != INPUT:
        if facts_of(program.eqns[p]).view is not View.RESHAPE:
            return False
        (var, *_) = program.eqns[p].invars
    return True


def _always_there(
    program: Program,
    order: Sequence[int],
    active: set[Any],
    carried: Sequence[Any],
    compiler: Compiler,
) -> set[Any]:
    """Tiny values without a derivative that any reader computes from inputs, or from nothing.

    No plan decides on them. A mask of a few entries that many layers read would put all of these
    into one region.
    """
    if not compiler.fuses_passes:
        return set()
    written = [p for p in order if not compiler.fuses(program.eqns[p])]
    made = (v for p in written for v in program.eqns[p].outvars)
    tiny = SETTINGS.tiny_share * sum(compiler.array_bytes(v.aval) for v in made)
    given = set(program.given).difference(carried)
    there: set[Any] = set()
    for p in order:
        eqn = program.eqns[p]
        is_known = all(v in given or v in there for v in program.sources(p))
        if is_known and compiler.fuses(eqn) and not has_effects(eqn):
            small = (v for v in eqn.outvars if compiler.array_bytes(v.aval) <= tiny)
            there.update(v for v in small if v not in active)
    return there


def _with_neighbours(
    node: CostNode, passing: int, written: Mapping[int, int], unit: CostUnit
) -> CostNode:
    """The node with what follows from the others.

    Values without a derivative may be live while it runs, and its fused results may be written for
    kernels that read them: they are computed in front of a product.
    """
    more = sum(unit.of_written(written[v]) for v in node.makes if v in written)
    most = max(node.momentary_bytes, passing)
    return dataclasses.replace(node, cost=node.cost + more, momentary_bytes=most)


def _name(program: Program, var: Any, steps: Mapping[int, int]) -> tuple[int, int]:
    p = program.producer[var]
    if p == INPUT:
        return p, program.given.index(var)
    return steps[p], list(program.eqns[p].outvars).index(var)
