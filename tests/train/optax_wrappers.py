"""The wrappers of the installed optax, so that a table without one of them is noticed."""

import inspect

import optax


def public_wrappers():
    """Return the name of each function or class that takes another transform.

    Deprecated ones do what the one of their successor does.
    """
    named = {"optax": optax, "optax.contrib": optax.contrib}
    found = {}
    for module, members in named.items():
        for name, member in vars(members).items():
            if not name.startswith("_") and callable(member) and _takes_a_transform(member):
                found.setdefault(member, f"{module}.{name}")
    return sorted(found.values())


def _takes_a_transform(member):
    if ".. deprecated::" in (member.__doc__ or ""):
        return False
    try:
        arguments = inspect.signature(member).parameters.values()
    except (TypeError, ValueError):
        return False
    return any("GradientTransformation" in str(argument.annotation) for argument in arguments)
