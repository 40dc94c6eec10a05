"""Running a range of equations so that the policy decides what is saved and what is recomputed.

Rules and tags that name something inside a loop, a branch or a `shard_map` body act there: the
construct is rebuilt with another body, through JAX's own functions.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jrc._jaxpr import Program, can_rebuild, evaluate, inline_marked, inner_program, rebuild, tag_of
from jrc.remat._policy.checkpoint_names import GROUP_SAVED, SAVED, name_value
from jrc.remat._policy.resolution import KEEP_TAG, RECOMPUTE, Policy
from jrc.remat._region.effects import must_run_once
from jrc.remat._region.recompute_groups import groups, with_views
from jrc.remat._region.region import Run, recomputed_group, region_program, should_inline
from jrc.remat._region.saved_equations import is_closed, save_call, save_equation
from jrc.remat._region.saved_results import is_differentiable_twice, save_function

Mode = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class EquationRange:
    """Equations of a program that run together.

    Attributes:
        program: The program.
        positions: The equations, in program order.
        outvars: The variables that they return.
        policy: The rules.
        saved: The values that are saved although the range is recomputed, with their action.
        name: Puts a saved value under the name that its action is.
        scope: The context that an equation runs in.
    """

    program: Program
    positions: Sequence[int]
    outvars: Sequence[Any]
    policy: Policy
    saved: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    name: Callable[[Any, str], Any] = name_value
    scope: Callable[[int], AbstractContextManager[Any]] | None = None

    @property
    def invars(self) -> Sequence[Any]:
        """The variables that they read and do not make."""
        return self.program.cut(self.positions, self.outvars).invars

    def run_recomputed(self, *inputs: Any) -> list[Any]:
        """Run the range as the body of a recomputed region."""
        values: dict[Any, Any] = dict(zip(self.invars, inputs, strict=True))
        for var in self.invars:
            if action := self.saved.get(var):
                values[var] = self.name(values[var], action)
        self._run_parts(values, {id(x) for x in inputs})
        return [values[var] for var in self.outvars]

    def run_saved(self, *inputs: Any) -> list[Any]:
        """Run the range as it is, except what a rule or a tag recomputes."""
        values: dict[Any, Any] = dict(zip(self.invars, inputs, strict=True))
        self._run_parts(values, None)
        return [values[var] for var in self.outvars]

    def _run_parts(self, values: dict[Any, Any], given: set[int] | None) -> None:
        """Run all equations.

        `given` has the identities of the values that are saved without a name; it is `None`
        where nothing is recomputed.
        """
        rerun: Collection[int] = [p for p in self.positions if self._is_rerun(p)]
        parts = [(list(self.positions), False)]
        if rerun:
            rerun = with_views(self.program, self.positions, rerun)
            parts = groups(self.program, self.positions, rerun)
        for part, is_group in parts:
            if is_group:
                self._run_group(part, rerun, values)
            elif given is None:
                self._run_outside(part, values)
            else:
                self._run_inside(part, values, given)

    def _run_inside(self, part: Sequence[int], values: dict[Any, Any], given: set[int]) -> None:
        for some, special in alternating(part, self._is_special):
            if special:
                self._run_special(some[0], values, given)
            else:
                run_jaxpr(self.program.cut(some), values)

    def _is_rerun(self, p: int) -> bool:
        """Whether a tag recomputes it, or a rule and no rule for the value saves the result."""
        eqn = self.program.eqns[p]
        if self._action(p) != RECOMPUTE or must_run_once(eqn):
            return False
        return tag_of(eqn) is not None or self.saved.keys().isdisjoint(eqn.outvars)

    def _action(self, p: int) -> str | None:
        return self.policy.action_of(self.program.eqns[p])

    def _is_special(self, p: int) -> bool:
        """Whether an equation cannot run as it is, together with its neighbours."""
        if self.scope is not None:
            return True
        eqn = self.program.eqns[p]
        if not self.saved.keys().isdisjoint(eqn.outvars) or tag_of(eqn) == KEEP_TAG:
            return True
        return self._has_other_body(p, EquationRange.run_recomputed)

    def _has_other_body(self, p: int, mode: Mode) -> bool:
        """Whether an equation runs with another body in this mode."""
        eqn = self.program.eqns[p]
        if tag_of(eqn) == RECOMPUTE:
            return True
        if mode is EquationRange.run_recomputed and region_program(eqn) is not None:
            return True
        return can_rebuild(eqn) and self._action(p) is None and self.policy.applies_inside(eqn)

    def _run_special(self, p: int, values: dict[Any, Any], given: set[int]) -> None:
        eqn = self.program.eqns[p]
        inputs = [values[var] for var in self.program.reads(p)]
        action = next((self.saved[var] for var in eqn.outvars if var in self.saved), None)
        is_kept = tag_of(eqn) == KEEP_TAG
        with self.scope(p) if self.scope else nullcontext():
            if is_kept:
                run = self._runner_of_tag(p)
                results = save_call(eqn, run, inputs, self._namer(SAVED), given)
            elif action is None:
                results = self._runner(p, EquationRange.run_recomputed)(*inputs)
            else:
                results = self._save(p, inputs, action)
        if is_kept or action is not None:
            given |= {id(x) for x in results}
        values |= dict(zip(eqn.outvars, results, strict=True))

    def _runner(self, p: int, mode: Mode) -> Run:
        """The equation as a function of the variables it reads, with another body if need be."""
        eqn = self.program.eqns[p]
        if not self._has_other_body(p, mode):
            return evaluate(self.program.cut([p], eqn.outvars))
        policy = self.policy
        if tag_of(eqn) == RECOMPUTE:
            policy, mode = Policy(), EquationRange.run_recomputed
        if (body := region_program(eqn)) is not None:
            # The outer region recomputes it: nested, it would run once more.
            return self.program.run(p, inner_function(body, Policy(), mode, self.name))
        inner = lambda jaxpr: inner_function(jaxpr, policy, mode, self.name)  # noqa: E731
        return self.program.run(p, rebuild(eqn, inner))

    def _runner_of_tag(self, p: int) -> Run:
        """A call of `jrc.keep_op` as a function of the variables it reads."""
        eqn = self.program.eqns[p]
        mode = EquationRange.run_saved
        inner = inner_function(inner_program(eqn), Policy(), mode, self.name)
        return self.program.run(p, inner)

    def _save(self, p: int, inputs: Sequence[Any], action: str) -> list[Any]:
        eqn = self.program.eqns[p]
        names = [self._namer(action if var in self.saved else None) for var in eqn.outvars]
        return save_equation(eqn, self._runner(p, EquationRange.run_recomputed), inputs, names)

    def _namer(self, action: str | None) -> Callable[[Any], Any]:
        return (lambda x: x) if action is None else lambda x: self.name(x, action)

    def _run_outside(self, part: Sequence[int], values: dict[Any, Any]) -> None:
        """Run equations that are not recomputed; rules and tags still act inside of them."""
        mode = EquationRange.run_saved
        is_kept = lambda p: tag_of(self.program.eqns[p]) == KEEP_TAG  # noqa: E731
        special = lambda p: is_kept(p) or self._has_other_body(p, mode)  # noqa: E731
        for some, is_special in alternating(part, special):
            if not is_special:
                run_jaxpr(self.program.cut(some), values)
                continue
            (p,) = some
            run = self._runner_of_tag(p) if is_kept(p) else self._runner(p, mode)
            results = run(*(values[var] for var in self.program.reads(p)))
            values |= dict(zip(self.program.eqns[p].outvars, results, strict=True))

    def _run_group(
        self, part: Sequence[int], rerun: Collection[int], values: dict[Any, Any]
    ) -> None:
        """Run recomputed operators and their readers, of which all other values are saved."""
        eqns = self.program.eqns
        saved = {var: GROUP_SAVED for p in part if p not in rerun for var in eqns[p].outvars}
        saved |= {var: action for var, action in self.saved.items() if var in saved}
        outvars = self.program.crossing(part)
        group = Group(self.program, part, outvars, self.policy, saved, self.name, self.scope)
        results = recomputed_group(group.run, [values[var] for var in group.invars])
        values |= dict(zip(group.outvars, results, strict=True))


class Group(EquationRange):
    """A range of which a few operators are recomputed, and all other values saved."""

    def run(self, *inputs: Any) -> list[Any]:
        """Run it as the body of its own region."""
        values: dict[Any, Any] = dict(zip(self.invars, inputs, strict=True))
        self._run_inside(self.positions, values, {id(x) for x in inputs})
        return [values[var] for var in self.outvars]

    def _save(self, p: int, inputs: Sequence[Any], action: str) -> list[Any]:
        eqn = self.program.eqns[p]
        if not can_rebuild(eqn) or is_closed(eqn):
            return super()._save(p, inputs, action)
        run = self._runner(p, EquationRange.run_saved)
        if not is_differentiable_twice(run, inputs):
            return super()._save(p, inputs, action)
        # A loop that reads a recomputed value saves all other values that its derivative reads.
        return save_function(run, inputs, self._namer(action), lambda _: False)


def inner_function(
    jaxpr: Any,
    policy: Policy,
    mode: Mode,
    name: Callable[[Any, str], Any] = name_value,
) -> Run:
    """Return a program inside another as a function that runs in a mode under the same rules.

    Args:
        jaxpr: The program.
        policy: The rules.
        mode: `EquationRange.run_recomputed` or `EquationRange.run_saved`.
        name: Puts a saved value under a name.
    """
    consts = list(jaxpr.consts)
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    program = Program(inline_marked(jaxpr, should_inline(policy)))
    live = program.live()
    positions = [p for p in range(len(program.eqns)) if live[p]]
    made = {var for p in positions for var in program.eqns[p].outvars}

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, [*consts, *inputs], strict=True))
        outvars = list(dict.fromkeys(v for v in program.jaxpr.outvars if _is_made(v, made)))
        saved = policy.values_to_save(program, positions)
        part = EquationRange(program, positions, outvars, policy, saved, name)
        results = mode(part, *(values[var] for var in part.invars))
        values |= dict(zip(outvars, results, strict=True))
        return program.results(values)

    return run


def run_jaxpr(jaxpr: Any, values: dict[Any, Any]) -> None:
    """Run a part of a program on the values of its inputs, and add those of its results."""
    results = evaluate(jaxpr)(*(values[var] for var in jaxpr.invars))
    values |= dict(zip(jaxpr.outvars, results, strict=True))


def alternating(
    positions: Sequence[int], special: Callable[[int], bool]
) -> list[tuple[list[int], bool]]:
    """Return the positions in order: special ones alone, the others in ranges."""
    parts: list[tuple[list[int], bool]] = []
    for p in positions:
        if special(p) or not parts or parts[-1][1]:
            parts.append(([p], special(p)))
        else:
            parts[-1][0].append(p)
    return parts


def _is_made(atom: Any, made: set[Any]) -> bool:
    return not hasattr(atom, "val") and atom in made
