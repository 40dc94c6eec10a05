"""How many programs a search for a plan may compile.

>>> compilation_limits(None, on_target=True, offloads=False)
(3, 3)
>>> compilation_limits(None, on_target=False, offloads=False)
(5, None)
>>> compilation_limits(7, on_target=True, offloads=False)
(7, 7)
>>> compilation_limits(7, on_target=False, offloads=False)
(7, None)
"""

from jrc._validate import whole_number
from jrc.remat._planner.settings import SETTINGS


def checked_compilations(compilations: int | None, who: str) -> int | None:
    """Return the number that a user asks for; `None` if there is none.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is not from 1 to 10.
    """
    if compilations is None:
        return None
    remedy = "Five find one of about thirty plans, each more doubles their number."
    return whole_number(compilations, "compilations", who, least=1, most=10, remedy=remedy)


def compilation_limits(
    asked: int | None, on_target: bool, offloads: bool
) -> tuple[int, int | None]:
    """Return how many candidates a search may compile, and the bound on all programs.

    Where a compilation may take a minute there is a bound.

    Args:
        asked: The number that a user asks for.
        on_target: Whether programs are compiled for an accelerator that is not there.
        offloads: Whether values may lie in the host's memory; one more is then compiled.

    Returns:
        The number, and the bound; `None` sets no bound.
    """
    if asked is not None:
        return asked, asked if on_target else None
    few = SETTINGS.compilations_on_target if on_target else SETTINGS.compilations
    few += offloads
    return few, few if on_target else None
