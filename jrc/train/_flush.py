"""The end of a compressed run: what was not sent reaches the parameters in one dense step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrc._errors import public
from jrc._tree import aval_of, has_tracers
from jrc._typing import Array, PyTree, Real
from jrc._validate import check_flag, scalar
from jrc.dgc import DGCState, EF21State
from jrc.dgc._internal import apply_residuals, dgc_states, with_states
from jrc.train._optax import differentiated
from jrc.train._state import TrainState


@public("jrc.flush")
def flush(state: TrainState, learning_rate: Real | Array, *, donate: bool = False) -> TrainState:
    r"""Apply what the replicas have not sent to the parameters, in one dense step.

    $$w \leftarrow w - \eta \, \frac{1}{N} \sum_{\text{replicas}} v, \quad
    u \leftarrow 0, \quad v \leftarrow 0$$

    At high sparsity some entries are sent a few times in a whole run, and what is in v at its end
    would never be applied. Call this after the last step, before evaluation and export:

    ```python
    for batch in batches:
        state, info = step(state, batch)
    state = jrc.flush(state, 0.1)
    ```

    It costs as many bytes as one dense step. Training may go on: the compressed leaves then begin
    without momentum, as factor masking leaves entries that were sent. Counters, the key, and the
    states of other transforms stay, and so does what `optax.MultiSteps` has accumulated.

    Only the learning rate is applied to v. Transforms behind `jrc.scale_by_dgc` that scale a
    direction further belong into `learning_rate`.

    Args:
        state: The state of a run, on any mesh; every process calls this.
        learning_rate: Eta, a number or `float32[]`: the rate at which v was gathered. With a
            schedule that ends at zero, take one of the steps before, such as
            `schedule(int(state.step) // 2)`.
        donate: Whether the memory of parameters, u and v may be used again; `state` is lost then.

    Returns:
        The state, placed as before. Parameters are equal on every replica, bit for bit. Arrays that
        do not change are shared with the old state: a step that donates the new one deletes them
        there too.

    Raises:
        TypeError: If `state` is no `TrainState`, `learning_rate` no number (a schedule is none), or
            `donate` no bool.
        ValueError: If there is no `DGCState`, or `learning_rate` is not finite.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        >>> tx = jrc.dgc_momentum(0.5, 0.9, 0, min_size=0, axis_name="data")
        >>> state = jrc.init_state({"w": jnp.ones(2)}, tx, jax.random.key(0), mesh=mesh)
        >>> v = {"w": jnp.array([[1.0, 8.0], [3.0, 0.0]])}
        >>> state = state._replace(opt_state=(state.opt_state[0]._replace(v=v), state.opt_state[1]))
        >>> jrc.flush(state, 0.5).params["w"].tolist()
        [0.0, -1.0]

    Source: the residual of Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.
    """
    found = _checked(state)
    check_flag(donate, "donate")
    remedy = "Pass 0.1, or schedule(int(state.step)) for a schedule."
    rate = jnp.asarray(scalar(learning_rate, "learning_rate", remedy=remedy), jnp.float32)
    arrays = differentiated(state.params), [(each.u, each.v) for each in found]
    params, rows = _program(arrays, bool(donate))(*arrays, rate)
    if isinstance(state.params, optax.LookaheadParams):
        params = state.params._replace(fast=params)
    new = iter(each._replace(u=u, v=v) for each, (u, v) in zip(found, rows, strict=True))
    opt_state = with_states(state.opt_state, lambda _: next(new))
    return state._replace(params=params, opt_state=opt_state)


def _checked(state: Any) -> list[DGCState]:
    """Return the states of all compressions, at least one."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a TrainState, got {type(state).__name__}. Pass the state that "
            "jrc.init_state or a train step returned."
        )
    found = dgc_states(state.opt_state)
    averages = any(isinstance(each, EF21State) for each in found)
    if not found or averages:
        arrived = "an EF21State" if averages else f"none in {type(state.opt_state).__name__}"
        raise ValueError(
            f"state must have a DGCState in its opt_state, got {arrived}. Without "
            "jrc.scale_by_dgc no step is kept back: leave jrc.flush out."
        )
    return found


def _program(arrays: PyTree, donate: bool) -> Any:
    """Return the compiled step, whose results lie where the arrays do."""
    leaves, treedef = jax.tree.flatten(arrays)
    if has_tracers(leaves):
        return apply_residuals
    return _compiled(treedef, tuple(aval_of(leaf).sharding for leaf in leaves), donate)


@functools.lru_cache(maxsize=16)
def _compiled(treedef: Any, shardings: tuple[Any, ...], donate: bool) -> Any:
    # What is only donated must stay an argument, so that its memory is used again.
    return jax.jit(
        apply_residuals,
        donate_argnums=(0, 1) if donate else (),
        keep_unused=donate,
        out_shardings=treedef.unflatten(shardings),
    )
