"""A plan said by names, for frameworks that take a `jax.checkpoint` policy and no plan.

A policy by names saves every value that carries one of its names, wherever that stands. So a plan
can be said by names if all that it saves is tagged, and if of each name it saves all values or
none. Where a function has `jax.checkpoint` regions, the policy is one for these regions: what is
made outside of them is saved in any case.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from jrc._jaxpr import Fusion, Opened, Program, facts_of, label, nbytes, place
from jrc._text import memory_text
from jrc.remat._gradient.opaque import Opaque
from jrc.remat._planner.execute.execute import variable_at
from jrc.remat._planner.plan.decision import AS_WRITTEN, Decision, Stage
from jrc.remat._planner.program.trace import inlined_program

_NAMED = 3


@dataclasses.dataclass(frozen=True)
class ByName:
    """What names can say of a plan.

    Attributes:
        names: The tags of which the plan saves at least half of the bytes, in program order.
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
    is_seen_by_jax: bool = False


def by_name(
    program: Program,
    decision: Decision | None,
    opened: Opened,
    opaque: Sequence[Opaque],
) -> ByName:
    """Return what names can say of a decision.

    Args:
        program: The program.
        decision: The decision.
        opened: The regions of the user's.
        opaque: What is opaque under the decision.
    """
    if decision is None:
        return ByName(lost=("nothing is recomputed, so that no names can say what is saved",))
    if decision == AS_WRITTEN:
        return ByName(lost=("the function runs as it is written, under its own policies",))
    reader = _Reader(opened, {}, {}, 0, [])
    reader.read(program, decision, 1)
    return reader.result(opaque)


def policy_of(found: ByName, decision: Decision | None) -> Any:
    """Return the policy of JAX that saves what has one of the names."""
    if decision is None:
        return jax.checkpoint_policies.everything_saveable
    names, offloaded = (
        [name for name in some if name not in found.marks]
        for some in (found.names, found.offloaded)
    )
    if offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    if not names:
        return jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint_policies.save_only_these_names(*names)


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

    def read(self, program: Program, decision: Decision, times: int) -> None:
        """Read a program, and those inside of it that have a decision of their own."""
        places = (variable_at(program, place) for place in decision.offloaded)
        on_host = dict.fromkeys(map(program.unmarked, places))  # in program order
        for value in on_host:
            self._count_offloaded(program, value, times * nbytes(value.aval))
        for stage in decision.stages:
            if stage.region:
                self._read_region(program, stage, times, on_host)
            elif stage.inside is None and len(stage.positions) > 1:
                self._read_left_to_jax(program, stage)
            else:
                self._read_construct(program, stage, times)

    def _read_left_to_jax(self, program: Program, stage: Stage) -> None:
        """Read equations that are left to JAX: in a region of the user's, they are recomputed."""
        eqns = [program.eqns[program.steps[k]] for k in stage.positions]
        made = {program.unmarked(v) for eqn in eqns for v in eqn.outvars}
        if not self.opened.count or not made.isdisjoint(self.opened.inside):
            self.constructs.append(
                f"what JAX saves from {place(eqns[0])} on, outside of all regions"
            )

    def _read_region(
        self, program: Program, stage: Stage, times: int, on_host: Collection[Any]
    ) -> None:
        made = [
            (var, program.unmarked(var), (k, i) in stage.saved, k in stage.recomputed)
            for k in stage.positions
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
            makers = (program.eqns[p] for p in program.marks[numbered])
            tag.is_seen_by_jax |= any(eqn.primitive.name != "mark" for eqn in makers)
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
        makers = (program.eqns[p] for p in program.marks[numbered])
        tag.is_seen_by_jax |= any(eqn.primitive.name != "mark" for eqn in makers)

    def _read_construct(self, program: Program, stage: Stage, times: int) -> None:
        eqn = program.eqns[program.steps[stage.positions[0]]]
        inside = stage.inside
        if inside is None:
            return
        where = f"{eqn.primitive.name} at {place(eqn)}"
        if inside.parts:
            steps = " and ".join(str(steps) for steps, _ in inside.parts)
            self.constructs.append(f"the {where} runs in parts of {steps} steps")
            return
        if inside.chunks:
            self.constructs.append(f"the {where} runs in {inside.chunks} chunks")
            return
        if not self.opened.count:
            self.constructs.append(f"the {where} has no jax.checkpoint around what it repeats")
            return
        for jaxpr, each in _bodies(eqn, inside):
            self.read(inlined_program(jaxpr), each, times * eqn.params.get("length", 1))

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
        marks = [name for name in (*names, *host) if not self.tags[name].is_seen_by_jax]
        return ByName(tuple(names), tuple(lost), tuple(marks), tuple(host))


def _bodies(eqn: Any, inside: Decision) -> Iterator[tuple[Any, Decision]]:
    if not inside.branches:
        yield eqn.params["jaxpr"], inside
        return
    for jaxpr, branch in zip(eqn.params["branches"], inside.branches, strict=True):
        if branch is not None:
            yield jaxpr, branch


def _largest(sizes: dict[str, int]) -> str:
    """The largest values by name, and the bytes of all."""
    ordered = sorted(sizes, key=lambda each: -sizes[each])
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return f"{', '.join(ordered[:_NAMED])}{more} ({memory_text(sum(sizes.values()))})"


def lost_text(found: ByName, decision: Decision | None, is_policy: bool) -> str:
    """Return what names do not say, in words; nothing if they say all."""
    if is_policy and decision is None:
        return ""
    lost = list(found.lost)
    if is_policy and found.marks:
        marks = ", ".join(map(repr, found.marks))
        lost.append(f"{marks}, named by jrc.mark alone, which no policy of JAX sees")
    return "; ".join(lost)
