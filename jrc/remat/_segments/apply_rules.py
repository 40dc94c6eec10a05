"""`jrc.apply_rules`: rules for a whole function, without cutting it."""

from collections.abc import Callable
from typing import Any

from jrc._errors import name_of, named_like, public
from jrc._jaxpr import Program, evaluate, tag_of, tagged, trace, walk
from jrc._validate import check_flag
from jrc.remat._policy.check import check_policy
from jrc.remat._policy.resolution import KEEP_TAG, Policy
from jrc.remat._policy.rules import Rule, check_keep
from jrc.remat._region.interpreter import EquationRange, inner_function
from jrc.remat._region.region import Run, should_inline
from jrc.remat._segments.cut import one_segment
from jrc.remat._segments.run_sections import run_sections


@public("jrc.apply_rules")
def apply_rules[F: Callable[..., Any]](
    fn: F, keep: Rule | None = None, *, recompute_collectives: bool = False
) -> F:
    """Save or recompute single values and operators of a function.

    With rules that save (`jrc.Save`, `jrc.SavePrimitives`, `jrc.Offload`) all other values are
    recomputed, at once, when the backward pass reaches the function. To bound the memory of that,
    cut the function with `jrc.recompute_segments(..., keep=...)`. With `jrc.RecomputePrimitives`
    alone, or with no rule but `jrc.recompute_op` inside, those operators are recomputed, each
    together with its readers, and all other values are saved. The innermost rule or tag wins.

    Args:
        fn: Any JAX-traceable function of pytrees, as for `jrc.recompute_segments`.
        keep: The rules, joined with `|`.
        recompute_collectives: Whether `psum`, `all_gather` and the like are recomputed too.

    Returns:
        The same function.

    Raises:
        TypeError: If `fn` is no function or `keep` is no rule.
        ValueError: When called, if `keep` names a mark that is not there, operators of which none
            is there, or a memory that the device lacks.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w) @ w)
        >>> w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
        >>> lean = jrc.apply_rules(loss, jrc.RecomputePrimitives("tanh"))
        >>> bool(jnp.allclose(jax.grad(lean)(w, x), jax.grad(loss)(w, x)))
        True

    Source: MindSpore `Primitive.recompute`; `jax.checkpoint_policies`.
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, got {type(fn).__name__}. Pass the function itself, and "
            "call what is returned."
        )
    check_keep(keep)
    check_flag(recompute_collectives, "recompute_collectives")
    policy = Policy(keep, not recompute_collectives)

    @named_like(fn)
    def ruled(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs, should_inline(policy))
        with public("jrc.apply_rules"):
            check_policy(policy, traced.program, name_of(fn))
        program = traced.program
        if keep is None or policy.saves_by_default:
            return traced.run(_saved(program, policy))
        sections = one_segment(program, policy)
        return traced.run(lambda *inputs: run_sections(program, sections, inputs))

    return ruled  # type: ignore[return-value]


def with_op_tags[F: Callable[..., Any]](fn: F) -> F:
    """Return a function with `apply_rules` around it where it has tagged operators.

    Python calls `fn` once. Without tags its program runs as it is.
    """
    policy = Policy(None)

    @named_like(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        program = traced.program
        has_tags = any(tag_of(eqn) is not None for eqn, _ in walk(program.jaxpr))
        return traced.run(_saved(program, policy) if has_tags else evaluate(program.jaxpr))

    return call  # type: ignore[return-value]


def _saved(program: Program, policy: Policy) -> Run:
    """Return the program whose values are all saved, except what a rule or a tag recomputes."""
    return tagged(inner_function(program.jaxpr, policy, EquationRange.run_saved), KEEP_TAG)
