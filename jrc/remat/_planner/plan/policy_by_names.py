"""A plan said by names, for frameworks that take a `jax.checkpoint` policy and no plan.

A policy by names saves every value that carries one of its names, wherever that stands. So a plan
can be said by names if all that it saves is tagged, and if of each name it saves all values or
none. Where a function has `jax.checkpoint` regions, the policy is one for these regions: what is
made outside of them is saved in any case.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax

from jrc._jaxpr import (
    Fusion,
    Opened,
    Program,
    facts_of,
    inner_programs,
    label,
    nbytes,
    place,
)
from jrc._text import memory_text
from jrc.remat._gradient.opaque import Opaque
from jrc.remat._planner.plan.cheapest_names import Graphs, cheapest_names
from jrc.remat._planner.plan.decision import (
    AsWritten,
    Baseline,
    Construct,
    Decision,
    LeftToJax,
    Loop,
    Region,
    Stages,
    variable_at,
    walk,
)
from jrc.remat._policy.checkpoint_names import policy_of_names

_NAMED = 3


@dataclasses.dataclass(frozen=True)
class ByName:
    """What names can say of a plan.

    Attributes:
        names: The tags whose values the plan saves, in program order. Where they do not say the
            plan, those whose policy recomputes the fewest FLOPs in about the same bytes.
        lost: What they do not say, a sentence each; empty if they say the plan.
        marks: Those of the names that `jrc.mark` alone gives, which no policy of JAX sees.
        offloaded: The tags of the values that it saves in the host's memory.
    """

    names: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


@dataclasses.dataclass
class _Tag:
    """The values of one name: bytes that are saved, that are recomputed, and that are offloaded."""

    saved: int = 0
    recomputed: int = 0
    offloaded: int = 0


def by_name(
    program: Program,
    decision: Decision,
    opened: Opened,
    opaque: Sequence[Opaque],
    graphs: Graphs,
) -> ByName:
    """Return what names can say of a decision.

    Args:
        program: The program.
        decision: The decision.
        opened: The regions of the user's.
        opaque: What is opaque under the decision.
        graphs: The cost graphs of the program and of those inside.
    """
    if isinstance(decision, Baseline):
        return ByName(lost=("nothing is recomputed, so that no names can say what is saved",))
    if isinstance(decision, AsWritten):
        return ByName(lost=("the function runs as it is written, under its own policies",))
    reader = _Reader(opened, {}, {}, 0, [])
    for inner, stages, times in walk(program, decision, enter=reader.enters):
        reader.read(inner, stages, times)
    found = reader.result(opaque)
    if found.lost:
        names = cheapest_names(program, decision, opened, graphs, found.offloaded)
        found = dataclasses.replace(found, names=names)
    return dataclasses.replace(found, marks=_by_marks_alone(program, decision, found))


def _by_marks_alone(program: Program, decision: Stages, found: ByName) -> tuple[str, ...]:
    """Return those of the names that `jrc.mark` alone gives."""
    seen_by_jax = {
        numbered.partition("#")[0]
        for inner, _, _ in walk(program, decision)
        for numbered, positions in inner.marks.items()
        if any(inner.eqns[p].primitive.name != "mark" for p in positions)
    }
    return tuple(name for name in (*found.names, *found.offloaded) if name not in seen_by_jax)


def policy_of(found: ByName, decision: Decision) -> Any:
    """Return the policy of JAX that saves what has one of the names."""
    if isinstance(decision, Baseline):
        return jax.checkpoint_policies.everything_saveable
    names, offloaded = (
        [name for name in some if name not in found.marks]
        for some in (found.names, found.offloaded)
    )
    if not (names or offloaded):
        return jax.checkpoint_policies.nothing_saveable
    return policy_of_names(names, offloaded, "pinned_host")


@dataclasses.dataclass
class _Reader:
    """Collects, over a program and the programs inside, what is saved and under which names.

    Attributes:
        opened: The regions of the user's; if there are none, the whole function is one.
        tags: The names, in program order.
        unnamed: Bytes that are saved without a name, by what they are.
        outside: Bytes that are recomputed outside of all regions, where a policy saves them.
        constructs: What loops and branches do that no name says.
    """

    opened: Opened
    tags: dict[str, _Tag]
    unnamed: dict[str, int]
    outside: int
    constructs: list[str]

    def enters(self, program: Program, construct: Construct) -> bool:
        """Whether names can say what is saved inside of a construct; note what they cannot."""
        eqn = program.eqns[program.steps[construct.equation]]
        where = f"{eqn.primitive.name} at {place(eqn)}"
        parts = construct.parts if isinstance(construct, Loop) else ()
        if len(parts) > 1:
            steps = " and ".join(str(part.steps) for part in parts)
            self.constructs.append(f"the {where} runs in parts of {steps} steps")
        elif parts and parts[0].segments:
            self.constructs.append(f"the {where} runs in {parts[0].segments} segments")
        elif not self.opened.count:
            self.constructs.append(f"the {where} has no jax.checkpoint around what it repeats")
        else:
            return True
        return False

    def read(self, program: Program, decision: Stages, times: int) -> None:
        """Read a program that runs so often."""
        places = (variable_at(program, place) for place in decision.offloaded)
        on_host = dict.fromkeys(map(program.unmarked, places))  # in program order
        for value in on_host:
            self._count_offloaded(program, value, times * nbytes(value.aval))
        for stage in decision.stages:
            if isinstance(stage, Region):
                self._read_region(program, stage, times, on_host)
            elif isinstance(stage, LeftToJax):
                self._read_left_to_jax(program, stage)

    def _read_left_to_jax(self, program: Program, stage: LeftToJax) -> None:
        """Read equations that are left to JAX: in a region of the user's, they are recomputed."""
        eqns = [program.eqns[program.steps[k]] for k in stage.equations]
        # What a loop or a branch saves inside has no name in any case.
        eqns = [eqn for eqn in eqns if not inner_programs(eqn)]
        made = {program.unmarked(v) for eqn in eqns for v in eqn.outvars}
        if eqns and (not self.opened.count or not made.isdisjoint(self.opened.inside)):
            self.constructs.append(
                f"what JAX saves from {place(eqns[0])} on, outside of all regions"
            )

    def _read_region(
        self, program: Program, region: Region, times: int, on_host: Collection[Any]
    ) -> None:
        made = [
            (var, program.unmarked(var), (k, i) in region.saved, k in region.recomputed)
            for k in region.equations
            for i, var in enumerate(program.eqns[program.steps[k]].outvars)
            if program.unmarked(var) not in on_host
        ]
        # A tag is an equation of its own: what is saved of a value and its tags counts once.
        saved = {value: nbytes(var.aval) for var, value, is_saved, _ in made if is_saved}
        for value, size in saved.items():
            self._count(program, value, size * times, True)
        for var, value, _, is_recomputed in made:
            if is_recomputed and value is var and value not in saved:
                self._count(program, value, nbytes(var.aval) * times, False)

    def _count(self, program: Program, value: Any, size: int, is_saved: bool) -> None:
        numbered, maker = program.names.get(value), program.producer[value]
        if self.opened.count and value not in self.opened.inside:
            is_light = maker < 0 or facts_of(program.eqns[maker]).fusion is Fusion.INSIDE
            is_written = not is_light or value in self.opened.leaving
            self.outside += size if is_written and not is_saved else 0
        elif numbered:
            tag = self.tags.setdefault(numbered.partition("#")[0], _Tag())
            tag.saved += size if is_saved else 0
            tag.recomputed += 0 if is_saved else size
        elif is_saved:
            text = label(program.eqns[max(maker, 0)])
            self.unnamed[text] = self.unnamed.get(text, 0) + size

    def _count_offloaded(self, program: Program, value: Any, size: int) -> None:
        numbered = program.names.get(value)
        if numbered is None:
            text = f"a value of {value.aval.str_short()} on the host"
            self.unnamed[text] = self.unnamed.get(text, 0) + size
            return
        tag = self.tags.setdefault(numbered.partition("#")[0], _Tag())
        tag.offloaded += size

    def result(self, opaque: Sequence[Opaque]) -> ByName:
        """Return what names can say of all that was read."""
        lost = list(dict.fromkeys(self.constructs))
        if self.unnamed:
            lost.append(f"{_largest(self.unnamed)} saved without a name")
        for name, tag in self.tags.items():
            if tag.saved and tag.recomputed:
                rest = memory_text(tag.recomputed)
                lost.append(f"of {name!r} {memory_text(tag.saved)} are saved, {rest} not")
            if tag.offloaded and (tag.saved or tag.recomputed):
                size = memory_text(tag.offloaded)
                lost.append(f"of {name!r} {size} are on the host, the rest is not")
        hidden = sum(each.bytes for each in opaque if not each.recomputed)
        if hidden and not self.opened.count:
            lost.append(f"{memory_text(hidden)} that opaque functions save")
        if self.outside:
            size = memory_text(self.outside)
            lost.append(f"{size} outside of your regions are recomputed, which a policy saves")
        names = [n for n, tag in self.tags.items() if tag.saved and tag.saved >= tag.recomputed]
        host = [n for n, t in self.tags.items() if t.offloaded > 0 and t.offloaded >= t.saved]
        names = [name for name in names if name not in host]
        return ByName(tuple(names), tuple(lost), offloaded=tuple(host))


def _largest(sizes: dict[str, int]) -> str:
    """The largest values by name, and the bytes of all."""
    ordered = sorted(sizes, key=lambda each: -sizes[each])
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return f"{', '.join(ordered[:_NAMED])}{more} ({memory_text(sum(sizes.values()))})"


def lost_text(found: ByName, decision: Decision, is_policy: bool) -> str:
    """Return what names do not say, in words; nothing if they say all."""
    if is_policy and isinstance(decision, Baseline):
        return ""
    lost = list(found.lost)
    if is_policy and found.marks:
        marks = ", ".join(map(repr, found.marks))
        lost.append(f"{marks}, named by jrc.mark alone, which no policy of JAX sees")
    return "; ".join(lost)
