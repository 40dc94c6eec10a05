"""`jrc.plan`: the fastest recomputation that fits a budget."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._errors import name_error, name_of, public
from jrc._progress import shown_meanwhile
from jrc._targets import Target, abstract_on, checked_target, target_device_context
from jrc._validate import check_flag, one_of
from jrc.remat._gradient.arguments import arguments_of, refuse_tracers
from jrc.remat._gradient.compiled_memory import device_of
from jrc.remat._planner.budget import (
    Budget,
    BudgetError,
    checked_compilations,
    checked_reserve,
    limit_of,
)
from jrc.remat._planner.costs.copy_bandwidth import copy_bandwidth_of
from jrc.remat._planner.costs.cost_unit import Minimize
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_cache import check_cache, plan_in
from jrc.remat._planner.plan.plan_of_process_0 import plan_of_process_0
from jrc.remat._planner.plan_as_it_is import PlannerAsItIs
from jrc.remat._planner.program.signature import Signature, signature_of
from jrc.remat._planner.program.trace import traced_for_plan
from jrc.remat._planner.search.choose import plan_for
from jrc.remat._planner.search.peaks import Peaks, fingerprint_of
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._time.host_rates import host_rates


@public("jrc.plan")
def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: int | str | float | None = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    verify: bool = True,
    compilations: int | None = None,
    respect_checkpoints: bool = False,
    cache: str | os.PathLike[str] | None = None,
    target: Target | str | None = None,
    offload: bool | float = False,
    minimize: Minimize = "time",
    measure: bool = False,
    chunks: bool = True,
    reserve: Any = None,
) -> Plan:
    """Return the fastest recomputation whose compiled gradient program fits a budget.

    For every intermediate value the planner weighs saving it against recomputing it, in seconds and
    in bytes at each position of the backward pass: what is saved so far, what is recomputed there,
    cotangents. It plans inside of `lax.scan`, `lax.cond` and `shard_map` too, cuts loops into
    segments where that pays, and gives the first steps of a loop a leaner plan than the last. The
    result is a list of candidates from the leanest to the baseline, in which nothing is recomputed.
    Manual plans stand beside them: the program cut into regions, each under a `jax.checkpoint`,
    products saved, and the like. A few candidates are compiled to find the one that fits; nothing
    is run. The function is called twice, and once more for each candidate that is compiled.

    `Plan.apply` is the plan itself; `Plan.policy` says it by names, for a framework that takes a
    policy of `jax.checkpoint`.

    Regions under a `jax.checkpoint` of your own (flax's `nn.remat`, `nnx.remat`, `nn.remat_scan`,
    `keras.remat`) are opened, in loops and branches too: what is inside is planned like the rest,
    and names that a policy saves are marks. The baseline, and so a budget of 1.0 and the FLOPs that
    others are compared with, is the program without these regions; the function with them is a
    manual plan, "your jax.checkpoint as written". What a policy offloads to another memory is the
    plan's to decide too, see `offload`. With `respect_checkpoints=True` regions stay.

    Opaque are `lax.while_loop` and functions with a `custom_vjp` (or a `custom_jvp` around
    products): what their forward rule saves counts exactly, and one may run again as a whole inside
    of a region. The printed plan names them with their bytes. What such a function recomputes by
    itself, as `jrc.recompute_scan` does, it recomputes in the baseline as well; a line says so.

    The peak is that of `jax.jit(jax.value_and_grad(fn, argnums, has_aux))` as XLA states it for
    one device: arguments + outputs + temporaries - aliased. Integers, keys and the like in a
    differentiated argument (a train state, a flax nnx module) get no gradient. With arguments that
    `jit` shards over devices, compiled peaks, and so budgets and fractions of them, are right. A
    predicted peak is a guess there: temporaries are divided by the number of parts of the argument,
    or of the value with a sharding constraint, that is split most. In `shard_map` sizes are those
    of one device.

    What is compiled is the program of `jax.jit(jax.value_and_grad(plan.apply(fn), ...))` itself.
    With JAX's persistent cache of compiled programs (`jax_compilation_cache_dir`) your own call
    finds it there. Not on CPU, where the planner compiles without optimised machine code, several
    times faster.

    A plan for one device's part of the data, with that part's shapes, may be applied inside of
    `shard_map`: to see a mesh axis changes nothing in a program but its types.

    Args:
        fn: A JAX-traceable function of pytrees that returns a scalar loss, floating; pure, but
            that it may change variables of flax nnx modules that it is given.
        *args: Its arguments, by position: arrays, numbers, or `jax.ShapeDtypeStruct`s, in any
            pytree. Numbers are traced, as under `jax.jit`, unless `fn` needs their values (a shape
            depends on them, an equinox module has them as fields); then they stay numbers, as the
            log says. Strings, functions and the like stay what they are, and are passed to the
            planned function in the same way. Others are bound before:
            `functools.partial(fn, train=True)` is what is planned and applied to.
        budget: Bytes (`int`), text (`"1.5GiB"`, `"800MB"`), a share of the baseline's peak
            (`"60%"`), or a fraction (`float` in [0, 1]) between the least peak that is reached (0)
            and that of the baseline (1). If it is left out it is nine tenths of the memory of one
            device, of the target's or of what is there; on a CPU of the machine's.
        argnums: The arguments that are differentiated. `None` plans the function as it is, not
            its gradient: an evaluation, `jax.hessian(loss)`, per-example gradients, a simulation.
            Its results may be anything. Chunks are what a plan has for it; the other options
            then must stay as they are, but for `target`.
        has_aux: Whether `fn` returns `(loss, aux)`.
        verify: Whether programs are compiled. Without, the plan is the model's guess, which does
            not promise to fit: docs/limits.md has its errors.
        compilations: How many programs a search may compile: 6 if not given.
            Chunks, both ends of a fraction, and making sure that no plan fits take up to 19 more.
        respect_checkpoints: Whether a region under a `jax.checkpoint` of your own stays as you
            wrote it, opaque to the planner: its inputs and what its policy saves count, and nothing
            inside is decided. The plan remembers it, and `Plan.apply` does the same.
        cache: A folder of plans. A plan for the same program, arguments of this function, device
            and versions is read from there; a new one is stored.
        target: An accelerator that need not be there, a `jrc.Target` or its name (`"v5e:2x2"`,
            `"h100"`): its own compiler compiles the programs. Arguments that are sharded over
            `target.devices` stay so, and the others are replicated there, or on its first device.
        offload: Whether values that loops (`lax.scan`) save may lie in pinned host memory between
            the forward and the backward pass; or the bytes per second that copies reach. Of
            keeping, recomputing and moving a value the plan takes what costs the least time at
            its peak; copies run at the device's `Target.copy_bandwidth`, and cost what the step of
            the loop does not hide of them. With `minimize="flops"` a second is what half of the
            published FLOP/s compute. For accelerators: on a CPU nothing would move.
        minimize: `"time"`: seconds of the gradient program, with `"flops"` its FLOPs. Before a
            program is compiled its seconds come from the device's rates, published ones of an
            accelerator, measured ones of a CPU (once a machine, some seconds); of a compiled one
            from its compiler (TPUs) or a roofline over its kernels. They are made to compare
            programs: docs/limits.md has their errors. Of a device of unknown rates the FLOPs are
            minimised; `Plan.minimize` says which.
        measure: Whether the fastest of the programs that were compiled and fit are run, in turns,
            and the one of the least median is taken. The device must be there, and the arguments
            arrays.

        chunks: Whether regions of the program may run in chunks (see `jrc.chunked`) where no plan
            without them fits, or where one costs time. A region begins and ends where values are
            small for the budget: the logits and the loss, attention, the wide middle of an MLP, in
            loops too. The ends of a fraction are those of the function without chunks.
        reserve: What else lies on each device while the program runs, such as the optimizer's
            state: bytes (`int`), text (`"2GiB"`), or a pytree of arrays or shapes
            (`jax.eval_shape(tx.init, params)`). It is taken off a budget in bytes, and
            `Plan.budget` is what is left.

    Returns:
        The plan. The same inputs and versions give the same plan on every host, whatever was
        planned before; by time on a CPU its rates have to be the same too. With several processes
        all get that of process 0. It is the cheapest that was found: more budget leads to other
        compilations, and may in rare cases end at a plan of more seconds, or FLOPs.

    Raises:
        TypeError: If `fn` is no function, does not take the arguments, does not return a scalar
            loss as `has_aux` says, or the budget is neither a number nor text. If an array is
            traced, as under `jax.jit`: an argument, or one that `fn` closes over.
        ValueError: If the budget is no size, `compilations` not from 1 to 10, `minimize` another
            word, there is nothing floating to be differentiated, `offload` is asked for on a CPU,
            or where no rate is known, or `measure` with a target, with shapes in place of arrays,
            with `minimize="flops"` or without `verify`; if `reserve` leaves nothing of the budget,
            or the budget is not in bytes.
        BudgetError: If no plan fits; it carries the least peak and the plan that reaches it.
        ImportError: If the compiler of the target is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.sum(x)
        >>> w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
        >>> lean = jrc.plan(loss, w, x, budget=0.0)
        >>> free = jrc.plan(loss, w, x, budget=1.0)
        >>> lean.reruns, lean.verified.peak_bytes < free.verified.peak_bytes
        (True, True)
        >>> grads = jax.jit(jax.grad(lean.apply(loss)))(w, x)

    Source: the solver follows Kusumoto et al., "A Graph Theoretic Framework of Recomputation
    Algorithms for Memory-Efficient Backpropagation", arXiv 1905.11722.
    """
    asked = {
        "argnums": argnums,
        "has_aux": has_aux,
        "verify": verify,
        "compilations": compilations,
        "respect_checkpoints": respect_checkpoints,
        "cache": cache,
        "target": target,
        "offload": offload,
        "minimize": minimize,
        "measure": measure,
        "chunks": chunks,
        "reserve": reserve,
    }
    (found,) = plan_for_each(fn, *args, budgets=[budget], **asked)
    if isinstance(found, BudgetError):
        raise found
    return found


@public("jrc.plan")
def plan_for_each(
    fn: Callable[..., Any],
    *args: Any,
    budgets: Sequence[int | str | float | None],
    **options: Any,
) -> list[Plan | BudgetError]:
    """Return the plan of `jrc.plan` for each budget, or the error of one that no plan fits.

    The function is traced and solved once, and equal programs are compiled once.

    Args:
        fn: As for `plan`.
        *args: Likewise.
        budgets: Each as for `plan`.
        **options: The other arguments of `plan`.
    """
    planner = _planner_of(fn, args, **options)
    found: list[Plan | BudgetError] = []
    with shown_meanwhile("jrc.plan: tracing and solving"):
        for budget in budgets:
            try:
                found.append(planner.plan(budget))
            except BudgetError as error:
                error = error.beside(planner.reserve)
                name_error(error)
                found.append(error)
    return found


def _planner_of(
    fn: Callable[..., Any], args: tuple[Any, ...], argnums: Any = 0, **options: Any
) -> "_Planner | PlannerAsItIs":
    """What plans a gradient; or the function as it is, for which other options are refused."""
    if argnums is not None:
        return _Planner(fn, args, argnums, **options)
    own = {name: options.pop(name, None) for name in ("target", "reserve")}
    usual = inspect.signature(plan).parameters
    for name, value in options.items():
        if name not in usual:
            raise TypeError(f"options must be those of jrc.plan, got {name}=. Leave it out.")
        if value != usual[name].default:
            raise ValueError(
                f"argnums=None must be used with a function that is planned as it is, got "
                f"{name}={value!r}, which is of gradients. Leave one of the two out."
            )
    return PlannerAsItIs(fn, args, **own)


class _Planner:
    """The plans of one function for any budgets; its arguments are those of `plan`, checked."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        verify: bool = True,
        compilations: int | None = None,
        respect_checkpoints: bool = False,
        cache: str | os.PathLike[str] | None = None,
        target: Target | str | None = None,
        offload: bool | float = False,
        minimize: Minimize = "time",
        measure: bool = False,
        chunks: bool = True,
        reserve: Any = None,
    ) -> None:
        self.reserve = checked_reserve(reserve)
        check_flag(chunks, "chunks")
        self.chunks = chunks
        check_flag(verify, "verify")
        one_of(minimize, "minimize", ("time", "flops"))
        _check_measure(measure, target, verify, minimize, args)
        self.measures = measure
        self.target = there = checked_target(target)
        most = checked_compilations(compilations)
        self.compilations = most if verify else 0
        check_cache(cache)
        refuse_tracers(args)
        self.cache = cache
        args = abstract_on(there, args) if there else args
        copy_bandwidth = copy_bandwidth_of(offload, there, jax.tree.leaves(args))
        self.request = Request(
            fn,
            args,
            argnums,
            has_aux,
            respect_checkpoints,
            target=there.name if there else "",
            copy_bandwidth=copy_bandwidth,
            minimize=minimize,
        )

    def plan(self, budget: int | str | float | None) -> Plan:
        """Return the plan for a budget."""
        limit = limit_of(budget, self.target, self.request.args, self.reserve)
        with target_device_context(self.target):
            return plan_of_process_0(lambda: self._stored(limit))

    def _stored(self, limit: Budget) -> Plan:
        def find() -> Plan:
            given = self.compilations, self.measures, self.chunks
            return plan_for(self._peaks, limit, *given)

        if self.cache is None:
            return find()
        signature, gradient = self._fingerprints
        asked = {
            "gradient": gradient,
            "budget": limit,
            "argnums": self.request.argnums,
            "has_aux": self.request.has_aux,
            "compilations": self.compilations,
            "target": self.request.target,
            "offload": self.request.copy_bandwidth,
            "minimize": self.request.minimize,
            "measure": self.measures,
            "rates": self._rates,
            "chunks": self.chunks,
        }
        return plan_in(self.cache, signature, self.request.args, asked, find)

    @property
    def _rates(self) -> dict[str, Any] | None:
        """The rates of this machine's CPU, where a plan depends on them."""
        device = None if self.target else device_of(jax.tree.leaves(self.request.args))
        if device is None or device.platform != "cpu" or self.request.minimize == "flops":
            return None
        return dataclasses.asdict(host_rates())

    @functools.cached_property
    def _peaks(self) -> Peaks:
        return Peaks(Problem.of(self.request))

    @functools.cached_property
    def _fingerprints(self) -> tuple[Signature, str]:
        """The program without constants, and a hash of the gradient's program.

        The latter has custom rules, policies, shardings and small constants.
        """
        request = self.request
        respects = request.respect_checkpoints
        traced = traced_for_plan(request.fn, request.args, {}, respects)
        refuse_tracers(traced.inputs[: traced.closed], closed_by=name_of(request.fn))
        arguments = arguments_of(request.fn, request.args, request.argnums, numbers=True)
        gradient = fingerprint_of(arguments.lowered(request.fn, request.has_aux))
        return signature_of(traced, respects), gradient


def _check_measure(
    measure: object, target: object, verify: bool, minimize: str, args: tuple[Any, ...]
) -> None:
    check_flag(measure, "measure")
    if not measure:
        return
    leaves = jax.tree.leaves(args)
    given = {
        f"target={target!r}": target is not None,
        "verify=False": not verify,
        "minimize='flops'": minimize == "flops",
        "a jax.ShapeDtypeStruct": any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves),
        "a deleted array": any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves),
    }
    for what in (each for each, is_given in given.items() if is_given):
        raise ValueError(
            "measure=True must be used with programs that can run here, and with arrays as "
            f"arguments, to have the least seconds, got {what}. Leave one of the two out."
        )
