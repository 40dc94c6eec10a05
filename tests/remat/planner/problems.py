"""Planning problems for tests, and their options: the one place that knows how they are made."""

import functools

import jax

from jrc.remat._planner.search.choose import plan_of
from jrc.remat._planner.search.peaks import Peaks
from jrc.remat._planner.search.problem import Problem, Request
from jrc.remat._planner.search.search import Search


def problem_of(fn, args, argnums=0, has_aux=False, **request):
    """The planning problem of a function."""
    return Problem.of(Request(fn, tuple(args), argnums, has_aux, **request))


def program_of(problem):
    """The program of a problem's function."""
    return problem.function.traced.program


def applied(problem, option):
    """The function under an option."""
    return problem.function.applied(option.whole)


def gradient_of(problem, option):
    """The jaxpr of value and gradients under an option."""
    gradient = problem.function.gradient(option.whole)
    return gradient


def compiled_peaks(problem):
    """From an option to its compiled peak in bytes; equal programs are compiled once."""
    peaks = Peaks(problem)
    return functools.cache(lambda option: peaks.compiled(option).peak)


def named(problem):
    """The options that have a name, by it."""
    return {each.name: each for each in problem.options if each.name}


def shapes_of(args):
    """The shapes of arguments."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def row_of(problem):
    """The solver's options, the leanest first, and the baseline behind them."""
    return (*problem.front, problem.baseline)


def plan_as(problem, option, budget=1, compiled=False):
    """The plan that an option is, whether it fits or not; compiled, or predicted alone."""
    peaks = Peaks(problem)
    search = Search([*problem.options, option], peaks, int(compiled))
    if compiled:
        search.compile(option)
    return plan_of(search, peaks, option, budget)


def lean_of(problem):
    """The leanest option of the solver that recomputes something, or of manual plans."""
    return next(
        each for each in (*problem.front, *problem.manual) if problem.flops_of(each) > problem.flops
    )
