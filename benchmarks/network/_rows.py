"""What the commands of this folder share: links asked for, names of rows, checks of all workers."""

import argparse
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._lib.command import Run, at_least
from benchmarks.network._group import Group
from benchmarks.network._links import Links, Loopback, why_not

# At least a tenth of a second on the wire, and at most some seconds.
MB = 10**6
TRANSFER_SECONDS, TRANSFER_LEAST = 2, 40 * MB


def add_links(parser: argparse.ArgumentParser) -> None:
    """Add the options of links."""
    add = parser.add_argument
    add("--links", type=_rates, default=[None, 1000, 100],
        help="Mbit/s, or `unlimited` (default: unlimited,1000,100)")  # fmt: skip
    add("--loopback", action="store_true", help="without namespaces, even where there is root")


def _rates(text: str) -> list[int | None]:
    return [None if rate == "unlimited" else at_least(1)(rate) for rate in text.split(",")]


def links_for(count: int, loopback: bool) -> Links | Loopback:
    """Return the links of so many processes."""
    return Loopback(count) if loopback else Links(count)


def on_loopback(run: Run) -> bool:
    """Return whether there are no limited links, say why, and leave one row to measure then."""
    reason = "asked for" if run.options.loopback else why_not()
    if reason:
        run.options.links = [None]
        run.console.print(f"On loopback, without any limit: {reason}.")
    return bool(reason)


def transferred(group: Group, mbit: int | None, toy: bool) -> list[float]:
    """Return the Mbit/s of plain TCP at each process."""
    limited = max(TRANSFER_LEAST, (mbit or 0) * MB // 8 * TRANSFER_SECONDS)
    return group.transfer(MB if toy else limited)


def without_torch(platform: str) -> str | None:
    """Return why PyTorch cannot be measured here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "there is no PyTorch here (`pip install torch`)"
    if platform != "cpu":
        return "PyTorch's processes compute on CPU (`--platform cpu`)"
    return None


def merged(groups: Sequence[Group], request: str) -> dict[str, Any]:
    """Return what the first process of each group answers."""
    return {name: at for group in groups for name, at in group.ask(request)[0].items()}


def unequal(values: Iterable[Any]) -> bool:
    """Return whether any value differs from the others."""
    return len(set(values)) > 1


def row_name(links: Links | Loopback, mbit: int | None, settings: dict[str, Any]) -> str:
    """Return a row's name in the results, with every setting that is not the default."""
    rate = "loopback" if isinstance(links, Loopback) else rate_name(mbit)
    words = (f", {name.replace('_', ' ')} {value}" for name, value in settings.items())
    return f"{links.count} processes, {rate}" + "".join(words)


def rate_name(mbit: int | None) -> str:
    """Return the name of a link's rate."""
    if mbit is None:
        return "no limit"
    return f"{mbit // 1000} Gbit/s" if mbit % 1000 == 0 else f"{mbit} Mbit/s"
