"""Lookups in arguments, as of embeddings. A region that runs one again holds the whole table."""

from typing import Any

from jrc._jaxpr import INPUT, Program, is_variable, nbytes, primitive_name


def is_lookup(program: Program, eqn: Any) -> bool:
    """Return whether an equation takes rows of an argument, of fewer bytes than that has.

    The argument may be cast, and may have no gradient. Rows of more bytes, as of the edges of a
    graph, are better looked up again.
    """
    if primitive_name(eqn) != "gather":
        return False
    if nbytes(eqn.invars[0].aval) <= nbytes(eqn.outvars[0].aval):
        return False
    table = program.source(eqn.invars[0])
    while is_variable(table) and program.producer[table] != INPUT:
        made_by = program.eqns[program.producer[table]]
        if primitive_name(made_by) not in ("convert_element_type", "stop_gradient"):
            return False
        table = program.source(made_by.invars[0])
    return is_variable(table)
