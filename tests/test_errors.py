"""The public name in errors: of jrc's own checks, once, and nowhere else."""

import inspect
import pickle
import traceback

import jax
import jax.numpy as jnp
import pytest

import jrc
from jrc._errors import public, running_name, speaking_as

# A module of jrc, as far as its name goes.
SOURCE = '''
@public("jrc.check")
def check(x: int, *, least: int = 0) -> int:
    """Return x."""
    if x < least:
        raise ValueError(f"x must be >= {least}, got {x}. Write x={least}.")
    return x

@public("jrc.run")
def run(fn, *args):
    return fn(*args)

@public("jrc.own")
def own(kind, *args):
    raise kind(*args)

@public("jrc.wrap")
def wrap(fn):
    try:
        return fn()
    except KeyError as error:
        raise TypeError("fn must not look up a key.") from error

@public("jrc.again")
def again(fn):
    try:
        return fn()
    except ValueError:
        raise

@public("jrc.concatenated")
def concatenated(*arrays):
    return jnp.concatenate(arrays)

@public("jrc.make")
def make(fn):
    def made(*args):
        with public("jrc.made"):
            return checked(fn(*args))
    return made

def checked(x):
    if x is None:
        raise TypeError("fn must return a number, got None.")
    return x

@public("jrc.with_options")
def with_options(fn, *args, scale=1, steps=2):
    return fn(*args)

@public("jrc.Kind.name")
def name_of_it():
    return running_name()
'''
fake = {"__name__": "jrc.fake", "jnp": jnp, "public": public, "running_name": running_name}
exec(compile(SOURCE, "fake.py", "exec"), fake)


def text_of(call, *args, **kwargs):
    with pytest.raises(Exception) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def failing(*_):
    raise ValueError("my own text")


def test_a_check_of_jrc_gets_the_name_and_an_error_of_the_user_does_not():
    assert text_of(fake["check"], -1) == "jrc.check: x must be >= 0, got -1. Write x=0."
    assert text_of(fake["run"], failing) == text_of(fake["again"], failing) == "my own text"
    assert text_of(fake["wrap"], {}.popitem) == "jrc.wrap: fn must not look up a key."


def test_the_innermost_public_function_is_named_once():
    check, run = fake["check"], fake["run"]
    assert text_of(run, run, check, -1) == text_of(check, -1)
    # What a converted function calls may still name itself.
    assert text_of(fake["own"], ValueError, "jrc.old: no.") == "jrc.old: no."
    with (
        pytest.raises(ValueError, match=r"^jrc\.alias: x must be"),
        speaking_as("jrc.alias", "jrc.check"),
    ):
        run(check, -1)


def test_a_function_that_is_returned_has_a_name_of_its_own():
    made = fake["make"](lambda x: x)
    assert made(3) == 3 and text_of(made, None).startswith("jrc.made: fn must return")
    assert text_of(fake["make"](failing)) == "my own text"
    assert text_of(jax.jit(made), None).startswith("jrc.made: ")


def test_errors_of_jax_and_python_are_left_alone():
    assert not text_of(fake["concatenated"], jnp.ones(2), jnp.ones((2, 2))).startswith("jrc")
    assert text_of(fake["concatenated"], "text").count("jrc.concat") == 0
    assert text_of(fake["check"]).startswith("check() missing 1 required")
    assert text_of(fake["check"], "a").startswith("'<' not supported")
    assert text_of(fake["own"], KeyError) == "" and text_of(fake["own"], OSError, 2, "x") != ""


def test_an_option_that_is_not_taken_is_named_with_those_that_are():
    text = text_of(fake["with_options"], failing, 1, scal=2)
    assert text == (
        "jrc.with_options takes no option 'scal' (did you mean 'scale'?). Its options are scale, "
        "steps. Arguments of your function are positional here: bind one that is given by its "
        "name, functools.partial(fn, scal=...)."
    )
    assert text_of(fake["check"], y=3) == "jrc.check takes no option 'y'. Its options are least."
    assert text_of(fake["with_options"], lambda: failing(x=1)).startswith("failing() got an unexp")


def test_a_traceback_is_that_of_the_function_itself():
    with pytest.raises(ValueError) as raised:
        fake["run"](fake["check"], -1)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert frames == [inspect.currentframe().f_code.co_name, "run", "check"]
    assert raised.value.__cause__ is None and raised.value.__context__ is None


def test_errors_are_pickled_with_their_names():
    with pytest.raises(ValueError) as raised:
        fake["check"](-1)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    text = "budget must be met."
    with pytest.raises(jrc.BudgetError) as raised:
        fake["own"](jrc.BudgetError, text, 3)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.least_bytes) == (f"jrc.own: {text}", 3)


def test_the_function_looks_like_itself():
    check = fake["check"]
    assert (check.__name__, check.__doc__) == ("check", "Return x.")
    assert str(inspect.signature(check)) == "(x: int, *, least: int = 0) -> int"
    assert pickle.loads(pickle.dumps(jrc.recompute_segments)) is jrc.recompute_segments


def test_the_name_of_the_running_function_is_known():
    assert fake["name_of_it"]() == "jrc.Kind.name" and running_name() == "jrc"
    assert fake["run"](running_name) == "jrc.run"
    with pytest.raises(ValueError):
        fake["run"](failing)
    assert running_name() == "jrc"
