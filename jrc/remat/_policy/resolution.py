"""What an enclosing transform says of each value: held, offloaded, re-run, or nothing."""

import dataclasses
import warnings
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrc._errors import close_to, listed
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
from jrc.remat._policy.notices import emit_notice
from jrc.remat._policy.rules import (
    Offload,
    RecomputePrimitives,
    Rule,
    Save,
    SavePrimitives,
    names_in,
)

SAVED = "jrc.held"
"""The name under which values inside a re-run region are kept."""

GROUP_SAVED = "jrc.group"
"""The same inside a group of single operators that are re-run: see `_groups`."""

OFFLOADED = "jrc.offloaded"
"""The same in another memory; the memory kind follows a colon."""

KEEP_TAG = "kept"
RECOMPUTE = "rerun"
"""Words that a tagged call carries: see `jrc.keep_op` and `jrc.recompute_op`."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rules of one transform, ready to be asked.

    Attributes:
        keep: The user's rules, if there are any.
        collectives: Whether what a collective returns is held.
    """

    keep: Rule | None = None
    collectives: bool = True

    @property
    def saves_by_default(self) -> bool:
        """Whether what no rule names is left as JAX keeps it, because no rule says what is kept."""
        parts = () if self.keep is None else self.keep.parts
        return bool(parts) and all(isinstance(rule, RecomputePrimitives) for rule in parts)

    def action_of_mark(self, name: str) -> str | None:
        """How a value with this mark is kept, if a rule names it."""
        if name in names_in(self.keep, Save):
            return SAVED
        return self._offloaded if name in names_in(self.keep, Offload) else None

    def action_of(self, eqn) -> str | None:
        """How an equation's results are kept, or `RERUN`, if a rule or a tag names it."""
        if tag := tag_of(eqn):
            return SAVED if tag == KEEP_TAG else RECOMPUTE
        names = {primitive_name(eqn), call_name(eqn)}
        if names & names_in(self.keep, SavePrimitives):
            return SAVED
        if names & names_in(self.keep, RecomputePrimitives):
            return RECOMPUTE
        return SAVED if self.collectives and facts_of(eqn).is_collective else None

    def applies_to(self, eqn) -> bool:
        """Whether a rule or a tag names this equation, or the mark that it is."""
        mark = mark_of(eqn)
        return self.action_of(eqn) is not None or bool(mark and self.action_of_mark(mark[0]))

    def applies_inside(self, eqn) -> bool:
        """Whether a program inside this equation holds something it names, within its reach."""
        inner = inner_programs(eqn) if can_rebuild(eqn) else ()
        return any(self.applies_to(each) for jaxpr in inner for each in _reachable(jaxpr))

    def values_to_save(self, program: Program, positions: Iterable[int]) -> dict:
        """The values that these equations make, or name, and that are kept, with how."""
        found = {}
        for p in positions:
            eqn = program.eqns[p]
            mark = mark_of(eqn)
            how = self.action_of(eqn) if mark is None else self.action_of_mark(mark[0])
            if how not in (None, RECOMPUTE):
                found |= {program.unmarked(var): how for var in eqn.outvars}
        return found

    def check(self, program: Program, who: str, fn: str) -> None:
        """Refuse names that nothing in the program carries, and a memory that is not there."""
        eqns = list(_reachable(program.jaxpr))
        marks = {mark[0] for eqn in eqns if (mark := mark_of(eqn))}
        for kind in (Save, Offload):
            for name in sorted(names_in(self.keep, kind) - marks):
                where = program.hidden_marks.get(name)
                inside = f", which stands inside {where}" if where else close_to(name, marks)
                raise ValueError(
                    f"{who}: keep={kind.__name__}(...) names {name!r}{inside}; "
                    f"`{fn}` marks {listed(sorted(marks), 'nothing')} within its reach. Mark the "
                    "value with jrc.mark(x, name), or leave the name out."
                )
        known = {n for eqn in eqns for n in (primitive_name(eqn), call_name(eqn)) if n}
        for kind in (SavePrimitives, RecomputePrimitives):
            names = names_in(self.keep, kind)
            if names and not names & known:
                raise ValueError(
                    f"{who}: keep={kind.__name__}({listed(sorted(names))}) names no operator of "
                    f"`{fn}`, which has {', '.join(sorted(known))}. What JAX writes inline, as it "
                    "does gelu and softmax, is reached by jrc.keep_op and jrc.recompute_op."
                )
            if names - known:
                missing = sorted(names - known)
                emit_notice(
                    f"{who}: keep={kind.__name__}(...) names {listed(missing)}, and `{fn}` has no "
                    f"such operator{close_to(missing[0], known)}. Remove the name, or reach what "
                    "JAX writes inline with jrc.keep_op and jrc.recompute_op."
                )
        if place := self._place:
            check_memory(place, who)

    @property
    def _place(self) -> str | None:
        parts = () if self.keep is None else self.keep.parts
        return next((rule.to for rule in parts if isinstance(rule, Offload)), None)

    @property
    def _offloaded(self) -> str:
        return f"{OFFLOADED}:{self._place}"


def _reachable(jaxpr):
    """The equations that rules act on: those in loops, branches, calls and `shard_map` too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_programs(eqn) if can_rebuild(eqn) else ():
            yield from _reachable(inner)


def check_memory(kind: str, who: str) -> None:
    """Refuse a memory kind that the devices lack; warn where it is the device's own memory."""
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if kind not in kinds:
        raise ValueError(
            f"{who}: Offload(to={kind!r}) needs that memory on {device.platform}, which has "
            f"{listed(kinds)}. Choose one of them, or use jrc.Save."
        )
    if device.platform == "cpu":
        warnings.warn(
            f"{who}: Offload(to={kind!r}) moves nothing on CPU, whose memories are one and the "
            "same: no byte is saved here.",
            stacklevel=2,
        )


def checkpoint_policy(names: Iterable[str]):
    """The policy of `jax.checkpoint` that keeps values under these names, and no others."""
    saved = [name for name in names if not name.startswith(OFFLOADED)]
    offloaded = sorted(name for name in names if name.startswith(OFFLOADED))
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=offloaded[0].partition(":")[2],
    )


def name_value(x, how: str):
    """The value under the name that the policy looks for; a complex one in its two parts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # `jax.checkpoint` rounds what it keeps with an operator that knows no complex numbers.
        return jax.lax.complex(checkpoint_name(x.real, how), checkpoint_name(x.imag, how))
    return checkpoint_name(x, how)
