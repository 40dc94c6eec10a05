"""Checks of rules against the program that they act on."""

import warnings

import jax

from jrc._errors import close_to, listed, running_name
from jrc._jaxpr import Program, call_name, mark_of, primitive_name
from jrc.remat._policy.checkpoint_names import is_own_name
from jrc.remat._policy.notices import emit_notice
from jrc.remat._policy.resolution import Policy, reachable
from jrc.remat._policy.rules import Offload, RecomputePrimitives, Save, SavePrimitives, names_in


def check_policy(policy: Policy, program: Program, fn: str) -> None:
    """Raise if a rule names what the program does not have, or a memory the device does not have.

    Args:
        policy: The rules.
        program: The traced function.
        fn: The name of the user's function, for the error.

    Raises:
        ValueError: If a mark is missing, if all primitives of a kind of rule are, or the memory.
    """
    eqns = list(reachable(program.jaxpr))
    marks = {mark[0] for eqn in eqns if (mark := mark_of(eqn)) and not is_own_name(mark[0])}
    for kind in (Save, Offload):
        for name in sorted(names_in(policy.keep, kind) - marks):
            raise ValueError(_unknown_mark(program, marks, kind.__name__, name, fn))
    known = {n for eqn in eqns for n in (primitive_name(eqn), call_name(eqn)) if n}
    for kind in (SavePrimitives, RecomputePrimitives):
        _check_primitives(names_in(policy.keep, kind), known, kind.__name__, fn)
    if policy.memory_kind:
        check_memory(policy.memory_kind)


def _unknown_mark(program: Program, marks: set[str], kind: str, name: str, fn: str) -> str:
    construct = program.hidden_marks.get(name)
    where = f", which stands inside {construct}" if construct else close_to(name, marks)
    return (
        f"keep=jrc.{kind}(...) must name marks of `{fn}` within its reach "
        f"({listed(sorted(marks))}), got {name!r}{where}. Mark the value with jrc.mark(x, name), "
        "or leave the name out."
    )


def _check_primitives(names: frozenset[str], known: set[str], kind: str, fn: str) -> None:
    missing = sorted(names - known)
    if names and not names & known:
        raise ValueError(
            f"keep=jrc.{kind}(...) must name operators of `{fn}` "
            f"({', '.join(sorted(known))}), got {listed(missing)}. Operators that JAX writes "
            "inline, such as gelu and softmax, are reached by jrc.keep_op and jrc.recompute_op."
        )
    if missing:
        emit_notice(
            f"{running_name()}: keep=jrc.{kind}(...) names {listed(missing)}, and `{fn}` has no "
            f"such operator{close_to(missing[0], known)}. Remove the name; an operator that JAX "
            "writes inline is reached by jrc.keep_op and jrc.recompute_op."
        )


def check_memory(kind: str) -> None:
    """Raise if the devices have no such memory; warn where it is the device's own memory."""
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if kind not in kinds:
        raise ValueError(
            f"jrc.Offload(to=...) must name a memory kind of {device.platform} "
            f"({listed(kinds)}), got {kind!r}. Choose one of them, or use jrc.Save."
        )
    if device.platform == "cpu":
        warnings.warn(
            f"{running_name()}: Offload(to={kind!r}) moves nothing on CPU, whose memories are one "
            "and the same: it saves no bytes here.",
            stacklevel=2,
        )
