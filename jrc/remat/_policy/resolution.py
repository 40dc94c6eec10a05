"""From rules and operator tags to one action for each equation: save, offload, recompute, none."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jrc._jaxpr import (
    Program,
    call_name,
    can_rebuild,
    facts_of,
    inner_programs,
    mark_of,
    primitive_name,
    tag_of,
)
from jrc.remat._policy.checkpoint_names import OFFLOADED, SAVED
from jrc.remat._policy.rules import (
    Offload,
    RecomputePrimitives,
    Rule,
    Save,
    SavePrimitives,
    names_in,
)

KEEP_TAG = "kept"
"""The tag of a call of `jrc.keep_op`."""

RECOMPUTE = "rerun"
"""The tag of a call of `jrc.recompute_op`, and the action that it stands for."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rules of one transform, resolved for one equation at a time.

    An action is a name of `checkpoint_names` (save the results under it), `RECOMPUTE`, or `None`:
    what the transform does by default.

    Attributes:
        keep: The user's rules, if there are any.
        collectives: Whether the results of collectives are saved.
    """

    keep: Rule | None = None
    collectives: bool = True

    @property
    def saves_by_default(self) -> bool:
        """Whether values that no rule names are left to JAX: no rule says what is saved."""
        parts = () if self.keep is None else self.keep.parts
        return bool(parts) and all(isinstance(rule, RecomputePrimitives) for rule in parts)

    def action_of_mark(self, name: str) -> str | None:
        """Return the action for a value with this mark, if a rule names it."""
        if name in names_in(self.keep, Save):
            return SAVED
        is_offloaded = name in names_in(self.keep, Offload)
        return f"{OFFLOADED}:{self.memory_kind}" if is_offloaded else None

    def action_of(self, eqn) -> str | None:
        """Return the action for an equation's results, if a rule or a tag names it."""
        if tag := tag_of(eqn):
            return SAVED if tag == KEEP_TAG else RECOMPUTE
        names = {primitive_name(eqn), call_name(eqn)}
        if names & names_in(self.keep, SavePrimitives):
            return SAVED
        if names & names_in(self.keep, RecomputePrimitives):
            return RECOMPUTE
        return SAVED if self.collectives and facts_of(eqn).is_collective else None

    def applies_to(self, eqn) -> bool:
        """Return whether a rule or a tag names this equation, or the mark that it is."""
        mark = mark_of(eqn)
        return self.action_of(eqn) is not None or bool(mark and self.action_of_mark(mark[0]))

    def applies_inside(self, eqn) -> bool:
        """Return whether a rule or a tag names an equation inside this one, within its reach."""
        inner = inner_programs(eqn) if can_rebuild(eqn) else ()
        return any(self.applies_to(each) for jaxpr in inner for each in reachable(jaxpr))

    def values_to_save(self, program: Program, positions: Iterable[int]) -> dict:
        """Return the values that these equations make or name and rules save, with the action."""
        found = {}
        for p in positions:
            eqn = program.eqns[p]
            mark = mark_of(eqn)
            action = self.action_of(eqn) if mark is None else self.action_of_mark(mark[0])
            if action not in (None, RECOMPUTE):
                found |= {program.unmarked(var): action for var in eqn.outvars}
        return found

    @property
    def memory_kind(self) -> str | None:
        """The memory that values are offloaded to, if a rule offloads any."""
        parts = () if self.keep is None else self.keep.parts
        return next((rule.to for rule in parts if isinstance(rule, Offload)), None)


def reachable(jaxpr) -> Iterator[Any]:
    """Yield the equations that rules act on, in loops, branches, calls and `shard_map` too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_programs(eqn) if can_rebuild(eqn) else ():
            yield from reachable(inner)
