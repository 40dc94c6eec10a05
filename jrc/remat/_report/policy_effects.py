"""Policies of `jax.checkpoint` whose names match nothing, or whose decisions JAX ignores."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from jrc._errors import listed
from jrc._jaxpr import (
    facts_of,
    inner_programs,
    mark_of,
    policy_answer,
    policy_in,
    primitive_name,
    walk,
)
from jrc.remat._report.rerun_regions import RerunRegion, place_text

# The fields and closure variables in which JAX's policies have the names that they save.
_NAME_FIELDS = frozenset(
    "names_which_can_be_saved names_which_can_be_offloaded saveable_names".split()
)


def ignored_decisions(regions: Sequence[RerunRegion]) -> Iterator[str]:
    """Yield a warning for each policy that saves operators which are recomputed all the same."""
    found = {(each.place, names) for each in regions if (names := _ignored(each))}
    for where, names in sorted(found):
        yield (
            f"the policy of the jax.checkpoint region {where} saves {listed(names)}, and they are "
            "recomputed: jax_remat3 asks a policy about named values and matrix products only. "
            "Name them with jrc.mark and cut with jrc.recompute_segments(..., "
            "keep=jrc.Save('name')), or pass jax.checkpoint_policies.save_only_these_names."
        )


def _ignored(region: RerunRegion) -> tuple[str, ...]:
    """Return the operators that a region's policy saves and `jax_remat3` recomputes."""
    policy = policy_in(region.eqn)
    if policy is None or primitive_name(region.eqn) != "RematTraced":
        return ()
    saved = {primitive_name(each.eqn) for each in region.rerun if _is_saved(policy, each.eqn)}
    return tuple(sorted(saved))


def _is_saved(policy: Any, eqn: Any) -> bool:
    """Return what a policy answers for an operator; names have other warnings."""
    if mark_of(eqn) is not None or inner_programs(eqn):
        return False
    answer = policy_answer(policy, eqn)
    return answer is True or type(answer).__name__ in ("SaveableType", "Offloadable")


def unmatched_names(forward: Any, name: str) -> Iterator[str]:
    """Yield a warning for each name that a policy saves and nothing inside its region has."""
    warned = set()
    for eqn, _ in walk(forward):
        if not facts_of(eqn).is_region:
            continue
        policy = policy_in(eqn)
        saved = {each for each in _names_of(policy) if not each.startswith("jrc.")}
        inside = [each for jaxpr in inner_programs(eqn) for each, _ in walk(jaxpr)]
        named = {
            (mark[0], primitive_name(each) == "mark") for each in inside if (mark := mark_of(each))
        }
        names = {name for name, _ in named}
        marks = {name for name, is_ours in named if is_ours}
        checkpoint_names = {name for name, is_ours in named if not is_ours}
        for missing in sorted(saved - checkpoint_names):
            way_out = (
                "jax.checkpoint does not see jrc.mark: name it with "
                f"jax.ad_checkpoint.checkpoint_name, or use jrc.Save({missing!r}) with "
                "jrc.recompute_segments"
                if missing in marks
                else f"it has {listed(sorted(names - {''}), 'no names')}. Correct the policy"
            )
            text = (
                f"the policy of the jax.checkpoint region {place_text(eqn, name)} saves "
                f"{missing!r}, a name that nothing inside has: {way_out}."
            )
            if text not in warned:
                warned.add(text)
                yield text


def _names_of(policy: Any) -> set[str]:
    """Return the names that one of JAX's policies saves, from its fields or its closure."""
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
