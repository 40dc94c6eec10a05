"""Every compression must exchange over the axes of the step, or replicas would differ."""

from jrc._errors import listed
from jrc._layout import Layout
from jrc._typing import PyTree
from jrc.dgc._internal import dgc_states


def check_compression_axis(opt_state: PyTree, layout: Layout) -> None:
    """Raise if a compression exchanges over no axis or another one than the step's.

    Args:
        opt_state: The state of an optimizer with at least one compression, or its shapes.
        layout: The layout of the step.
    """
    axis = layout.replicas if layout.means is None else (layout.means, layout.replicas)
    found = [state.axis.name for state in dgc_states(opt_state)]
    if not any(found):
        raise ValueError(
            f"tx must exchange over the axis {axis!r} of the step with its "
            f"{layout.rows} replicas, got a compression with axis_name=None, "
            f"which is one replica. Pass axis_name={axis!r} to it."
        )
    for name in found:
        if name != axis:
            names = name[::-1] if isinstance(name, tuple) else (name or "",)
            known = [x for x in names if x in layout.mesh.axis_names]
            raise ValueError(
                f"every compression in tx must have the axis_name={axis!r} of the step, got "
                f"one that exchanges over {listed(known, 'no axis of the mesh')}, so that the "
                f"parameters of the replicas would differ. Pass axis_name={axis!r} to it."
            )
