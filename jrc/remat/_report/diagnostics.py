"""Recomputation without effect: regions that free nothing, and policies that nobody obeys.

A region frees what it makes again (its inner values) between the forward pass and its own backward
pass. It frees nothing of the peak if these values, had they been kept, would fit beside all else
at every moment of the backward pass.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from jrc._errors import listed
from jrc._jaxpr import (
    UNKNOWN,
    LiveEquation,
    Scope,
    facts_of,
    inner_programs,
    is_variable,
    mark_of,
    nbytes,
    place,
    primitive_name,
    scope_of,
    walk,
)
from jrc.remat._region.rerun_scope import is_planned, is_rerun

# Where JAX's policies, functions or values, hold the names that they let through.
_NAME_FIELDS = frozenset(
    "names_which_can_be_saved names_which_can_be_offloaded saveable_names".split()
)
_NEEDLESS = "the derivative needs nothing that is made inside. Leave out the wrap."


@dataclasses.dataclass(frozen=True, eq=False)
class RerunRegion:
    """A region where the backward pass runs it again.

    Attributes:
        place: Where the region stands, in words.
        bytes: What it makes again for its derivative.
        at: Its position among the gradient's equations; `None` inside a loop.
        ignored: Operators that its policy keeps and that are run again all the same.
    """

    place: str
    bytes: int
    at: int | None
    ignored: tuple[str, ...]


def warnings_of(
    forward: Any, gradient: Any, program: Sequence[LiveEquation], name: str
) -> list[str]:
    """What has no effect, each with the way out.

    Args:
        forward: The function's program.
        gradient: That of its value and gradient.
        program: The live equations of the latter.
        name: What the function is called.
    """
    regions = list(_regions(program, name))
    wrapped = dict.fromkeys(_where(eqn, name) for eqn in _outermost(forward))
    found = [
        f"the region {where} frees nothing: {_NEEDLESS}"
        for where in wrapped
        if where not in {each.place for each in regions}
    ]
    found += [*_useless(regions, gradient, program), *_unmatched(forward, name)]
    ignored = {(each.place, each.ignored) for each in regions if each.ignored}
    found += [
        f"the policy of the jax.checkpoint region {where} keeps {listed(names)}, and they are "
        "run again: jax_remat3 asks a policy of named values and matrix products only. Name them "
        "with jrc.mark and cut with jrc.recompute_segments(..., keep=jrc.Save('name')), or pass "
        "jax.checkpoint_policies.save_only_these_names."
        for where, names in sorted(ignored)
    ]
    return found


def _regions(
    program: Sequence[LiveEquation], name: str, outermost: bool = True
) -> Iterator[RerunRegion]:
    """Regions that are re-run, and are inside of no other."""
    for at, node in enumerate(program):
        if is_planned(node.eqn):
            continue
        if _is_region(node.eqn):
            yield _region(node, name, at if outermost else None)
        else:
            for part in node.inside:
                yield from _regions(part, name, outermost=False)


def _outermost(forward: Any) -> Iterator[Any]:
    """The regions of the function that are inside of no other."""
    for eqn in forward.eqns:
        if is_planned(eqn):
            continue
        if facts_of(eqn).is_region:
            yield eqn
        else:
            for inner in inner_programs(eqn):
                yield from _outermost(inner)


def _is_region(eqn: Any) -> bool:
    name = primitive_name(eqn)
    wrapped = name == "RematTraced" and is_rerun(eqn)
    return wrapped or (facts_of(eqn).is_region and bool(eqn.params.get("differentiated")))


def _region(node: LiveEquation, name: str, at: int | None) -> RerunRegion:
    inside = [each for part in node.inside for each in part]
    if primitive_name(node.eqn) == "RematTraced":
        kept, again = list(node.eqn.outvars), inside
    else:
        again = [each for each in inside if is_rerun(each.eqn)]
        read = {v for each in inside if not is_rerun(each.eqn) for v in each.eqn.invars
                if is_variable(v)}  # fmt: skip
        kept = [v for each in again for v in each.eqn.outvars if v in read]
    size = sum(nbytes(v.aval) for v in dict.fromkeys(kept))
    return RerunRegion(_where(node.eqn, name), size, at, _disobeyed(node.eqn, again))


def _where(eqn: Any, name: str) -> str:
    """Where a region stands: its line, or the function if no line of the user's made it."""
    return f"in `{name}`" if place(eqn) == UNKNOWN else f"at {place(eqn)}"


def _disobeyed(eqn: Any, again: Sequence[LiveEquation]) -> tuple[str, ...]:
    """What a policy keeps, and `jax_remat3` runs again without asking it."""
    policy = getattr(eqn.params.get("_prim"), "policy", None)
    if policy is None:
        return ()
    kept = [primitive_name(each.eqn) for each in again if _keeps(policy, each.eqn)]
    return tuple(sorted(set(kept)))


def _keeps(policy: Any, eqn: Any) -> bool:
    if mark_of(eqn) is not None or inner_programs(eqn):
        return False
    said = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return said is True or type(said).__name__ in ("SaveableType", "Offloadable")


def _useless(
    regions: Sequence[RerunRegion], gradient: Any, program: Sequence[LiveEquation]
) -> Iterator[str]:
    """Regions that could be kept, all of them, without a higher peak."""
    free = [*_kept_for_nothing(regions, gradient, program), *(r for r in regions if not r.bytes)]
    for where in sorted({each.place for each in free}):
        # The backward pass meets them last first.
        here = [each for each in regions if each.place == where][::-1]
        found = [i for i, each in enumerate(here) if each in free]
        some = _some(found, len(here))
        frees = f"{some} {where} {'frees' if len(found) == 1 else 'free'} nothing"
        if not any(here[i].bytes for i in found):
            yield f"{frees}: {_NEEDLESS}"
        elif len(regions) == 1:
            yield (
                f"{frees}: it is run again in one piece, and then holds what had been kept "
                "without it. Cut it into several regions, as "
                "jrc.recompute_segments(fn, ['block_0', ...]) does at marks."
            )
        else:
            yield (
                f"{frees} of the peak: the backward pass holds as much elsewhere. Keep what is in "
                "there (no_recompute_segments=... of jrc.recompute_segments), and save its re-run."
            )


def _some(found: Sequence[int], total: int) -> str:
    """Which of the regions of one place, counted from 0 in program order."""
    if total == 1:
        return "the region"
    numbers = ", ".join(map(str, found))
    return f"{'region' if len(found) == 1 else 'regions'} {numbers} of {total} (from 0)"


def _kept_for_nothing(
    regions: Sequence[RerunRegion], gradient: Any, program: Sequence[LiveEquation]
) -> list[RerunRegion]:
    """As many regions as can be kept together, by the sizes of what is kept and made again."""
    at = {each.at: each for each in regions if each.at is not None}
    levels = _levels(gradient, program)
    need = [level + (at[i].bytes if i in at else 0) for i, level in enumerate(levels)]
    highest, found = max(need, default=0), []
    # The first to be differentiated is kept for the shortest time.
    for i in sorted(at):
        more = [n + at[i].bytes * (j < i) for j, n in enumerate(need)]
        if at[i].bytes and max(more) <= highest:
            need, found = more, [*found, at[i]]
    return found


def _levels(gradient: Any, program: Sequence[LiveEquation]) -> list[int]:
    """Bytes of the forward pass's values that wait at each equation of the backward pass."""
    scope = Scope(gradient)
    made: dict[Any, int] = {}
    last: dict[Any, int] = {}
    backward = [("transpose(" in scope_of(node.eqn)) for node in program]
    for i, node in enumerate(program):
        for var in filter(is_variable, node.eqn.invars):
            last[scope.unviewed(var)] = i
        if not backward[i]:
            made |= {v: i for v in node.eqn.outvars if scope.unviewed(v) is v}
    changes = [0] * (len(program) + 1)
    for var, start in made.items():
        if var in last:
            changes[start] += nbytes(var.aval)
            changes[last[var] + 1] -= nbytes(var.aval)
    levels, level = [], 0
    for i, is_backward in enumerate(backward):
        level += changes[i]
        levels.append(level if is_backward else 0)
    return levels


def _unmatched(forward: Any, fn: str) -> Iterator[str]:
    """Names that a policy keeps and that nothing inside its region carries."""
    said = set()
    for eqn, _ in walk(forward):
        if not facts_of(eqn).is_region:
            continue
        policy = getattr(eqn.params.get("_prim"), "policy", None) or eqn.params.get("policy")
        names = {name for name in _names_of(policy) if not name.startswith("jrc.")}
        inside = [each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr)]
        marks = {name[0] for each in inside if (name := mark_of(each))}
        ours = {each.params["name"] for each in inside if primitive_name(each) == "mark"}
        theirs = {n[0] for e in inside if primitive_name(e) != "mark" and (n := mark_of(e))}
        for name in sorted(names - theirs):
            way = (
                f"jax.checkpoint does not see jrc.mark: name it with "
                f"jax.ad_checkpoint.checkpoint_name, or use jrc.Save({name!r}) with "
                "jrc.recompute_segments"
                if name in ours
                else f"it has {listed(sorted(marks - {''}), 'no names')}. Correct the policy"
            )
            text = (
                f"the policy of the jax.checkpoint region {_where(eqn, fn)} keeps {name!r}, a name "
                f"that nothing inside carries: {way}."
            )
            if text not in said:
                said.add(text)
                yield text


def _names_of(policy: Any) -> set[str]:
    """The names that one of JAX's policies lets through, as it holds them."""
    fields = dict(vars(policy)) if hasattr(policy, "__dict__") else {}
    if inspect.isfunction(policy):
        fields |= inspect.getclosurevars(policy).nonlocals
    found: set[str] = set()
    for key, value in fields.items():
        if key.startswith("policy"):
            found |= _names_of(value)
        elif key in _NAME_FIELDS:
            found |= set(value)
    return found
