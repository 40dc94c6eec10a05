"""Gradients by name, shared by `append_backward` and the optimizers."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrc._errors import close_to, listed, name_of, running_name, speaking_as
from jrc._jaxpr import Program, Traced, inline_all, trace
from jrc._tree import is_array, is_traced, named_leaves, split
from jrc._typing import Array, PyTree
from jrc._validate import check_flag
from jrc.compat.paddle._callbacks import call_back, checked_callbacks
from jrc.compat.paddle._check_loss import check_function, check_loss, leaf_names
from jrc.compat.paddle._names import Names, Request, checked_names, resolve
from jrc.compat.paddle._receivers import gated, gates_of, is_reached, probes_of, receivers
from jrc.remat import recompute_segments

_logger = logging.getLogger("jrc")


class _NamedGradient(NamedTuple):
    name: str
    grad: Array


@jax.tree_util.register_pytree_with_keys_class
class ParamGrad(_NamedGradient):
    """A pair `(name, grad)`. To JAX it is one array, so that it goes in and out of `jax.jit`.

    Attributes:
        name: The path of a parameter in the tree, `layer_0/w`, or the mark of an intermediate.
        grad: The gradient, in the shape and dtype of its parameter or intermediate.
    """

    __slots__ = ()

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], str]:
        """Return the gradient; the name is part of the structure."""
        return ((jax.tree_util.DictKey(self.name), self.grad),), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Sequence[Any]) -> "ParamGrad":
        """Return the pair of a name and its gradient."""
        return cls(name, *children)


class Found(NamedTuple):
    """The gradients of a request.

    Attributes:
        value: The result of the loss function.
        pairs: The gradients.
        value_of: The loss, an array of shape (), as a function of a dict of those parameters that
            have a pair; with the same stops and segments.
    """

    value: Any
    pairs: list[ParamGrad]
    value_of: Callable[[Mapping[str, Any]], Array]


class Arguments(NamedTuple):
    """Paddle's arguments, unchecked; see `append_backward`.

    `warned` holds the names of boundaries about which a warning was logged: each has one.
    """

    parameter_list: Any = None
    no_grad_set: Any = None
    callbacks: Any = None
    checkpoints: Any = None
    has_aux: bool = False
    warned: set[str] | None = None


def gradients(
    loss_fn: Callable[..., Any],
    params: PyTree,
    args: tuple[Any, ...],
    options: Arguments,
) -> Found:
    """Return the gradients of a loss."""
    check_function(loss_fn)
    check_flag(options.has_aux, "has_aux")
    leaf_names(params)
    callbacks = checked_callbacks(options.callbacks)
    wanted_names = checked_names("parameter_list", options.parameter_list, ordered=True)
    stopped_names = checked_names("no_grad_set", options.no_grad_set, ordered=False) or ()
    params = _as_arrays(params)
    traced = trace(loss_fn, (params, *args), {})
    check_loss(name_of(loss_fn), traced, options.has_aux)

    def request_of(program: Program) -> Request:
        names = Names(loss_fn, program, _parameters(program, params, args))
        return resolve(names, wanted_names, stopped_names)

    # Without nested `jit` calls, so that callbacks see every operator.
    flat = Program(inline_all(traced.program.jaxpr))
    wanted, stopped = request_of(flat)
    seen = receivers(flat, gates_of(flat, wanted, stopped), traced.inputs, bool(callbacks))
    if callbacks:
        call_back(callbacks, flat, _input_names(flat, params, args), seen)
    wanted = {name for name, var in wanted.items() if is_reached(var, seen)}
    request = request_of(traced.program)
    request = Request({k: v for k, v in request.wanted.items() if k in wanted}, request.stopped)
    named = _parameters(traced.program, params, args)
    return _differentiate(loss_fn, traced, request, options, named)


def _differentiate(
    loss_fn: Callable[..., Any],
    traced: Traced,
    request: Request,
    options: Arguments,
    named: Mapping[str, Any],
) -> Found:
    """Return the gradients of the requested values that have one, and of no others."""
    program, rest = traced.program, []
    gates = gates_of(program, request.wanted, request.stopped)
    run = gated(program, gates, traced.inputs)

    def loss(inputs: Sequence[Any], probes: Sequence[Any]) -> Any:
        return dataclasses.replace(traced, inputs=(inputs, probes)).run(run)

    loss.__name__ = name_of(loss_fn)
    lean = loss
    if options.checkpoints is not None:
        known = _known_boundaries(name_of(loss_fn), program, options)
        with speaking_as(running_name(), "jrc.recompute_segments"):
            lean = recompute_segments(loss, known, rule="fluid")

    def scalar(inputs: Sequence[Any], probes: Sequence[Any]) -> tuple[Array, list[Array]]:
        arrays, skeleton = split(lean(inputs, probes))
        rest.append(skeleton)
        return arrays[0].reshape(()), arrays

    given = dict(zip(program.jaxpr.invars, traced.inputs, strict=True))
    point = [given[var] for var in gates.inputs], probes_of(gates)
    (_, arrays), grads = jax.value_and_grad(scalar, (0, 1), has_aux=True)(*point)
    of = dict(zip((*gates.inputs, *gates.probed), (*grads[0], *grads[1]), strict=True))
    pairs = [ParamGrad(name, of[var]) for name, var in request.wanted.items()]

    def value_of(new: Mapping[str, Any]) -> Array:
        values = given | {named[name]: x for name, x in new.items()}
        return scalar([values[var] for var in gates.inputs], point[1])[0]

    return Found(rest[0].fill(arrays), pairs, value_of)


def _known_boundaries(fn: str, program: Program, options: Arguments) -> Any:
    """Return the boundaries that are marks; as in Paddle, others are dropped with a message."""
    warned = set() if options.warned is None else options.warned
    known = (*program.marks, *program.hidden_marks)
    if isinstance(options.checkpoints, str) or not isinstance(options.checkpoints, Iterable):
        return options.checkpoints  # `recompute_segments` raises
    found = []
    for name in options.checkpoints:
        if not isinstance(name, str) or program.matching_marks(name) or name in known:
            found.append(name)
        elif name not in warned:
            warned.add(name)
            _logger.warning(
                "%s: checkpoints must be marks of `%s`, got %r%s, which is ignored. It marks %s.",
                running_name(), fn, name, close_to(name, known), listed(known, "nothing"),
            )  # fmt: skip
    return found


def _as_arrays(params: PyTree) -> PyTree:
    """Return the parameters with floating numbers as JAX arrays, which can be differentiated."""

    def as_array(leaf: Any) -> Any:
        number = isinstance(leaf, float | complex) or (is_array(leaf) and not is_traced(leaf))
        floating = number and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        return jnp.asarray(leaf) if floating else leaf

    return jax.tree.map(as_array, params)


def _parameters(program: Program, params: PyTree, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the program's input for each parameter by name; `None` for other leaves."""
    given = iter(_given(program, params, args))
    return {name: next(given) if is_traced(leaf) else None for name, leaf in named_leaves(params)}


def _input_names(program: Program, params: PyTree, args: tuple[Any, ...]) -> dict[Any, str]:
    """Return a name for each input: a parameter's path, `args/0/…`, or `const_0`."""
    pairs = [*named_leaves(params), *named_leaves({"args": args})]
    names = [name for name, leaf in pairs if is_traced(leaf)]
    constants = [f"const_{i}" for i in range(len(program.jaxpr.invars) - len(names))]
    return dict(zip(program.jaxpr.invars, [*constants, *names], strict=True))


def _given(program: Program, params: PyTree, args: tuple[Any, ...]) -> Sequence[Any]:
    """Return the inputs that are not constants; constants come first."""
    arrays, _ = split((params, args))
    invars = program.jaxpr.invars
    return invars[len(invars) - len(arrays) :]
