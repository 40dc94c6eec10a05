"""What a row of the tables of messages is."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A wrong call, and what its error says.

    Attributes:
        name: What the user typed; the message begins with it.
        wrong: What is wrong, in a few words.
        call: The call; the current folder is an empty one.
        error: The error's class.
        rule: Part of the message: what holds.
        arrived: Part of the message: what was given.
        way_out: Part of the message: what to write.
    """

    name: str
    wrong: str
    call: Callable[[], Any]
    error: type[Exception]
    rule: str
    arrived: str
    way_out: str
