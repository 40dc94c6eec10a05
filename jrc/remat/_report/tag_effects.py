"""Operator tags, `jrc.keep_op` and `jrc.recompute_op`, that nothing acts on.

A transform of jrc replaces the calls that it acts on. A tagged call that is still in the gradient's
program was seen by no transform, or is the tag's own region: it has an effect only if something
inside it, or around it, is recomputed.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jrc._jaxpr import LiveEquation, place, tag_of
from jrc.remat._policy.resolution import KEEP_TAG
from jrc.remat._region.rerun_scope import is_planned, is_rerun
from jrc.remat._report.rerun_regions import place_text


@dataclasses.dataclass
class _Tag:
    """The tagged calls of one source line: forward pass, recomputation and backward pass.

    Attributes:
        where: The line, in words.
        is_kept: Whether the tag is that of `jrc.keep_op`, which `jrc.apply_rules` also uses.
        is_rerun: Whether a call is recomputed.
        has_rerun: Whether something inside a call is recomputed.
    """

    where: str
    is_kept: bool
    is_rerun: bool = False
    has_rerun: bool = False


def tags_without_effect(program: Sequence[LiveEquation], name: str) -> Iterator[str]:
    """Yield a warning for each source line whose tags have no effect.

    Args:
        program: The live equations of a function's value and gradient.
        name: The function's name.
    """
    found: dict[tuple[str, bool], _Tag] = {}
    _collect(program, name, False, found)
    for tag in found.values():
        if tag.is_kept and tag.is_rerun:
            yield (
                f"jrc.keep_op or jrc.apply_rules {tag.where} has no effect: the call is "
                "recomputed, because tags do not act inside jax.checkpoint, jrc.recompute_scan or "
                "a derivative rule. Use jrc.recompute or jrc.recompute_segments instead."
            )
        elif tag.is_kept and not tag.has_rerun:
            yield (
                f"jrc.keep_op or jrc.apply_rules {tag.where} has no effect: nothing around or "
                "inside it is recomputed. Leave it out, or put it inside jrc.recompute or "
                "jrc.recompute_segments."
            )
        elif not tag.is_kept and not tag.is_rerun and not tag.has_rerun:
            yield (
                f"jrc.recompute_op {tag.where} has no effect: its values are saved. Apply "
                "jrc.apply_rules to the function that contains it and the operators that read "
                "its result."
            )


def _collect(
    program: Sequence[LiveEquation],
    name: str,
    in_rerun: bool,
    found: dict[tuple[str, bool], _Tag],
) -> bool:
    """Add the tagged calls of a program to `found`; return whether it recomputes something."""
    has_rerun = False
    for node in program:
        if is_planned(node.eqn):
            continue
        here = in_rerun or is_rerun(node.eqn)
        parts = [_collect(part, name, here, found) for part in node.inside]
        has_rerun |= here or any(parts)
        if word := tag_of(node.eqn):
            key = place(node.eqn), word == KEEP_TAG
            tag = found.setdefault(key, _Tag(place_text(node.eqn, name), word == KEEP_TAG))
            tag.is_rerun |= here
            tag.has_rerun |= any(parts)
    return has_rerun
