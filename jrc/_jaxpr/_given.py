"""Programs in which some results are known beforehand."""

from typing import Any

from jax.extend.core import Jaxpr, Literal, Var


def with_results_given(jaxpr: Jaxpr, count: int) -> Jaxpr:
    """The program without its first `count` results, which become its last inputs.

    Whatever read such a result reads the input; what then serves nothing is left out.
    """
    given, wanted = jaxpr.outvars[:count], jaxpr.outvars[count:]
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    inputs = [Var(atom.aval) for atom in given]
    new = {var: x for var, x in zip(given, inputs, strict=True) if not _fixed(var) and var in made}
    eqns = [eqn.replace(invars=[_of(atom, new) for atom in eqn.invars]) for eqn in jaxpr.eqns]
    outvars = [_of(atom, new) for atom in wanted]
    needed = {atom for atom in outvars if not _fixed(atom)}
    live = []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(atom for atom in eqn.invars if not _fixed(atom))
    return jaxpr.replace(eqns=live[::-1], outvars=outvars, invars=[*jaxpr.invars, *inputs])


def _fixed(atom: Any) -> bool:
    return isinstance(atom, Literal)


def _of(atom: Any, new: dict[Var, Var]) -> Any:
    return atom if _fixed(atom) else new.get(atom, atom)
