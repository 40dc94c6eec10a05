"""Running a stretch of a program as a region: all re-run but what is held, or the other way round.

What a rule or a tag says inside of loops, branches and `shard_map` bodies is done there: those are
run again with other bodies, through JAX's own functions.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from jrc._jaxpr import (
    Program,
    Reads,
    can_rebuild,
    evaluate,
    facts_of,
    inline_marked,
    inner_programs,
    mark_of,
    rebuild,
    tag_of,
    walk,
)
from jrc.remat._policy.resolution import (
    GROUP_SAVED,
    KEEP_TAG,
    RECOMPUTE,
    SAVED,
    Policy,
    checkpoint_policy,
    name_value,
)
from jrc.remat._region.recompute_groups import groups, with_views
from jrc.remat._region.saved_results import (
    is_differentiable_twice,
    reads_inputs,
    save_function,
    save_results,
)

Run = Callable[..., Sequence[Any]]
Region = Callable[[Run, Sequence[Any]], Sequence[Any]]
Held = Mapping[Any, str]


def recomputed_region(body: Run, inputs: Sequence[Any], group: bool = False) -> Sequence[Any]:
    """Run a body whose values are re-run in the backward pass, but for those it holds by name.

    What a `group` holds for itself is re-run by the region around it.
    """
    jaxpr = jax.make_jaxpr(body)(*inputs)
    marks = (mark_of(eqn) for eqn, _ in walk(jaxpr))
    names = {mark[0] for mark in marks if mark and mark[0].startswith("jrc.")}
    names -= set() if group else {GROUP_SAVED}
    policy = checkpoint_policy(sorted(names)) if names else None
    return jax.checkpoint(evaluate(jaxpr), policy=policy)(*inputs)


def inlined_program(jaxpr: Any, policy: Policy) -> Program:
    """The program, every `jit` call that the rules speak of written inline."""
    return Program(inline_marked(jaxpr, should_inline(policy)))


def should_inline(policy: Policy) -> Callable[[Any], bool]:
    """Which `jit` calls the rules look into; one that a rule names itself stays closed."""
    return lambda eqn: policy.action_of(eqn) is None and policy.applies_inside(eqn)


@dataclasses.dataclass(frozen=True, eq=False)
class EquationRange:
    """Equations of a program that run together.

    Attributes:
        program: The program.
        positions: The equations, in program order.
        outvars: What they are to return.
        say: What the rules say.
        held: Values kept although the stretch is re-run, with how.
        name: Gives a held value the name that it is kept under.
        scope: Wraps the running of an equation.
    """

    program: Program
    positions: Sequence[int]
    outvars: Sequence[Any]
    policy: Policy
    held: Held = dataclasses.field(default_factory=dict)
    name: Callable[[Any, str], Any] = name_value
    scope: Callable[[int], AbstractContextManager[Any]] | None = None

    @property
    def invars(self) -> Sequence[Any]:
        """What they read and do not make."""
        return self.program.cut(self.positions, self.outvars).invars

    def run_recomputed(self, *inputs: Any) -> list[Any]:
        """Run it as the body of a region that is re-run."""
        values: dict[Any, Any] = dict(zip(self.invars, inputs, strict=True))
        for var in self.invars:
            if how := self.held.get(var):
                values[var] = self.name(values[var], how)
        self._run_parts(values, {id(x) for x in inputs})
        return [values[var] for var in self.outvars]

    def run_saved(self, *inputs: Any) -> list[Any]:
        """Run it so that JAX keeps what it likes, but for what a rule or a tag says is re-run."""
        values: dict[Any, Any] = dict(zip(self.invars, inputs, strict=True))
        self._run_parts(values, None)
        return [values[var] for var in self.outvars]

    def _run_parts(self, values: dict[Any, Any], given: set[int] | None) -> None:
        """Run all; `given` has what a held operator need not hold, `None` where nothing is held."""
        again = [p for p in self.positions if self._is_rerun(p)]
        parts = [(list(self.positions), False)]
        if again:
            again = with_views(self.program, self.positions, again)
            parts = groups(self.program, self.positions, again)
        for part, is_group in parts:
            if is_group:
                self._run_group(part, again, values)
            elif given is None:
                self._run_outside(part, values)
            else:
                self._run_inside(part, values, given)

    def _run_inside(self, part: Sequence[int], values: dict[Any, Any], given: set[int]) -> None:
        for some, special in _alternating(part, self._is_special):
            if special:
                self._run_special(some[0], values, given)
            else:
                _run(self.program.cut(some), values)

    def _is_rerun(self, p: int) -> bool:
        """Whether a tag says so, or a rule and no other rule that names the value."""
        eqn = self.program.eqns[p]
        is_held = not self.held.keys().isdisjoint(eqn.outvars)
        return self._says(p) == RECOMPUTE and (tag_of(eqn) is not None or not is_held)

    def _says(self, p: int) -> str | None:
        return self.policy.action_of(self.program.eqns[p])

    def _is_special(self, p: int) -> bool:
        if self.scope is not None:
            return True
        eqn = self.program.eqns[p]
        if not self.held.keys().isdisjoint(eqn.outvars) or tag_of(eqn) == KEEP_TAG:
            return True
        return self._has_other_body(p)

    def _has_other_body(self, p: int) -> bool:
        eqn = self.program.eqns[p]
        if tag_of(eqn) == RECOMPUTE:
            return Policy().applies_inside(eqn)
        return can_rebuild(eqn) and self._says(p) is None and self.policy.applies_inside(eqn)

    def _run_special(self, p: int, values: dict[Any, Any], given: set[int]) -> None:
        eqn = self.program.eqns[p]
        inputs = [values[var] for var in self.program.reads(p)]
        how = next((self.held[var] for var in eqn.outvars if var in self.held), None)
        with self.scope(p) if self.scope else nullcontext():
            if tag_of(eqn) == KEEP_TAG:
                results = self._hold_call(p, inputs, given)
            elif how is None:
                results = self._runner(p, EquationRange.run_recomputed)(*inputs)
            else:
                results = self._hold(p, inputs, how)
        if how is not None or tag_of(eqn) == KEEP_TAG:
            given |= {id(x) for x in results}
        values |= dict(zip(eqn.outvars, results, strict=True))

    def _runner(self, p: int, mode: Callable[..., Any]) -> Run:
        """The equation as a function of what it reads, with another body if it needs one."""
        eqn = self.program.eqns[p]
        if not self._has_other_body(p):
            return evaluate(self.program.cut([p], eqn.outvars))
        policy, mode = (
            (Policy(), EquationRange.run_recomputed)
            if tag_of(eqn) == RECOMPUTE
            else (self.policy, mode)
        )
        inner = lambda jaxpr: inner_function(jaxpr, policy, mode, self.name)  # noqa: E731
        return self.program.run(p, rebuild(eqn, inner))

    def _hold(self, p: int, inputs: Sequence[Any], how: str) -> list[Any]:
        eqn = self.program.eqns[p]
        names = [self._namer(how if var in self.held else None) for var in eqn.outvars]
        run = self._runner(p, EquationRange.run_recomputed)
        if (
            _reads_inside(eqn)
            or not facts_of(eqn).derivative_reads & Reads.RESULT
            or not eqn.invars
        ):
            return [name(x) for name, x in zip(names, run(*inputs), strict=True)]
        return save_results(run, inputs, names)

    def _namer(self, how: str | None) -> Callable[[Any], Any]:
        return (lambda x: x) if how is None else lambda x: self.name(x, how)

    def _hold_call(self, p: int, inputs: Sequence[Any], given: set[int]) -> list[Any]:
        """A call that is kept whole: its results, and what its derivative reads."""
        eqn = self.program.eqns[p]
        jaxpr, name = eqn.params["jaxpr"], self._namer(SAVED)
        names = [name] * len(eqn.outvars)
        run = self.program.run(
            p, inner_function(jaxpr, Policy(), EquationRange.run_saved, self.name)
        )
        if is_closed(eqn) or not is_differentiable_twice(run, inputs):
            return [name(x) for x in run(*inputs)]
        if any(facts_of(each).is_contraction for each, _ in walk(jaxpr)):
            # The arguments of a product are read by its derivative, whoever keeps its result.
            return save_function(run, inputs, name, lambda _: False)
        if not reads_inputs(run, inputs):
            return save_results(run, inputs, names)
        return save_function(run, inputs, name, lambda x: id(x) not in given)

    def _run_outside(self, part: Sequence[int], values: dict[Any, Any]) -> None:
        other = lambda p: self._has_other_body(p) or tag_of(self.program.eqns[p]) == KEEP_TAG  # noqa: E731
        for some, special in _alternating(part, other):
            if not special:
                _run(self.program.cut(some), values)
                continue
            (p,) = some
            eqn = self.program.eqns[p]
            run = self._runner(p, EquationRange.run_saved)
            if tag_of(eqn) == KEEP_TAG:
                inner = inner_function(
                    eqn.params["jaxpr"], Policy(), EquationRange.run_saved, self.name
                )
                run = self.program.run(p, inner)
            results = run(*(values[var] for var in self.program.reads(p)))
            values |= dict(zip(eqn.outvars, results, strict=True))

    def _run_group(self, part: Sequence[int], again: Iterable[int], values: dict[Any, Any]) -> None:
        """Operators to be re-run and their readers, of which all that is not re-run is held."""
        again = set(again)
        eqns = self.program.eqns
        held = {var: GROUP_SAVED for p in part if p not in again for var in eqns[p].outvars}
        held |= {var: how for var, how in self.held.items() if var in held}
        outvars = self.program.crossing(part)
        group = Group(self.program, part, outvars, self.policy, held, self.name, self.scope)
        results = recomputed_region(group.run, [values[var] for var in group.invars], group=True)
        values |= dict(zip(group.outvars, results, strict=True))


class Group(EquationRange):
    """A stretch of which a few operators are re-run; whatever else it makes is held."""

    def run(self, *inputs: Any) -> list[Any]:
        """Run it as the body of its own region."""
        values: dict[Any, Any] = dict(zip(self.invars, inputs, strict=True))
        self._run_inside(self.positions, values, {id(x) for x in inputs})
        return [values[var] for var in self.outvars]

    def _hold(self, p: int, inputs: Sequence[Any], how: str) -> list[Any]:
        eqn = self.program.eqns[p]
        if not can_rebuild(eqn) or is_closed(eqn):
            return super()._hold(p, inputs, how)
        run = self._runner(p, EquationRange.run_saved)
        if not is_differentiable_twice(run, inputs):
            return super()._hold(p, inputs, how)
        # A loop that reads what is re-run keeps the rest of what it needs.
        return save_function(run, inputs, self._namer(how), lambda _: False)


def inner_function(
    jaxpr: Any,
    policy: Policy,
    mode: Callable[..., Any],
    name: Callable[[Any, str], Any] = name_value,
) -> Run:
    """A program inside another as a function, run in this mode under the same rules."""
    consts = list(jaxpr.consts)
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    program = inlined_program(jaxpr, policy)
    live = program.live()
    positions = [p for p in range(len(program.eqns)) if live[p]]
    made = {var for p in positions for var in program.eqns[p].outvars}

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, [*consts, *inputs], strict=True))
        outvars = list(dict.fromkeys(v for v in program.jaxpr.outvars if _is_made(v, made)))
        held = policy.values_to_save(program, positions)
        stretch = EquationRange(program, positions, outvars, policy, held, name)
        results = mode(stretch, *(values[var] for var in stretch.invars))
        values |= dict(zip(outvars, results, strict=True))
        return program.results(values)

    return run


def _reads_inside(eqn: Any) -> bool:
    """Whether a derivative reads what happens inside, whatever is known of the results."""
    return (can_rebuild(eqn) and eqn.primitive.name != "jit") or is_closed(eqn)


def is_closed(eqn: Any) -> bool:
    """Whether no derivative can be put around this one.

    A `custom_vjp` has no `jvp`, and that of a `cond` has no transpose once it is batched.
    """
    inner = (each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr))
    return any(facts_of(each).is_closed for each in (eqn, *inner))


def _is_made(atom: Any, made: set[Any]) -> bool:
    return not hasattr(atom, "val") and atom in made


def _run(jaxpr: Any, values: dict[Any, Any]) -> None:
    results = evaluate(jaxpr)(*(values[var] for var in jaxpr.invars))
    values |= dict(zip(jaxpr.outvars, results, strict=True))


def _alternating(
    positions: Sequence[int], special: Callable[[int], bool]
) -> list[tuple[list[int], bool]]:
    """The positions in order: special ones alone, the others in stretches."""
    parts: list[tuple[list[int], bool]] = []
    for p in positions:
        if special(p) or not parts or parts[-1][1]:
            parts.append(([p], special(p)))
        else:
            parts[-1][0].append(p)
    return parts
