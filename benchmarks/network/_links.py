"""A slow network on one machine: namespaces, each with one link to a common switch.

Everything, the switch too, is in network namespaces whose names have this process's id, and is
removed when the block ends:

    with Links(2) as links:
        links.limit(100)
        subprocess.run([*links.enter(0), "ip", "address"])

`tc` limits both ends of each link, so a process sends and receives at no more than the rate. The
burst that may pass at once is small, since a payload smaller than the burst would pass without a
limit. At 1 Gbit/s it is just above the 64 KiB that the kernel sends in one piece; with a smaller
one the kernel would split pieces into frames on the CPU, which network cards do elsewhere.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

INTERFACE = "jrc0"
HOSTS = pathlib.Path("/etc/netns")
LEAST_BURST, BURST_A_MBIT = 16_000, 70


def why_not() -> str | None:
    """Return what is missing for slow links, or None if they can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (it comes with iproute2)"
    try:
        with Links(1) as links:
            links.limit(100)
    except (subprocess.CalledProcessError, OSError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return f"this machine refuses a limited link: {reason.strip()}"
    return None


def limit_command(name: str, interface: str, mbit: int | None) -> list[str]:
    """Return the `tc` command that limits what an interface sends; None is no limit."""
    at = ["tc", "-n", name, "qdisc"]
    if mbit is None:
        return [*at, "delete", "dev", interface, "root"]
    burst = max(LEAST_BURST, mbit * BURST_A_MBIT)
    rate = ["rate", f"{mbit}mbit", "burst", f"{burst}b", "latency", "50ms"]
    return [*at, "replace", "dev", interface, "root", "tbf", *rate]


def counters(interface: str, root: str = "/sys/class/net") -> dict[str, int]:
    """Return the bytes that an interface has sent and received so far."""
    folder = pathlib.Path(root, interface, "statistics")
    ways = {"sent": "tx_bytes", "received": "rx_bytes"}
    return {way: int((folder / name).read_text()) for way, name in ways.items()}


class Links:
    """`count` namespaces, joined by a switch; not limited at first."""

    interface = INTERFACE

    def __init__(self, count: int) -> None:
        self.count = count
        self._switch = f"jrc-{os.getpid()}-switch"
        self._limited = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Links":
        try:
            self._build()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def enter(self, rank: int) -> list[str]:
        """Return the words before a command that make it run in a namespace."""
        return ["ip", "netns", "exec", self._name(rank)]

    def address(self, rank: int) -> str:
        """Return the address of a process."""
        return f"10.77.0.{rank + 1}"

    def limit(self, mbit: int | None) -> None:
        """Limit every link, in both directions."""
        if mbit is None and not self._limited:
            return
        for rank in range(self.count):
            _run(limit_command(self._name(rank), INTERFACE, mbit))
            _run(limit_command(self._switch, f"port{rank}", mbit))
        self._limited = mbit is not None

    def _name(self, rank: int) -> str:
        return f"jrc-{os.getpid()}-{rank}"

    def _build(self) -> None:
        self._namespace(self._switch)
        self._ip(self._switch, "link", "add", "name", "switch", "type", "bridge")
        self._ip(self._switch, "link", "set", "switch", "up")
        for rank in range(self.count):
            self._join(rank)

    def _join(self, rank: int) -> None:
        name, port = self._name(rank), f"port{rank}"
        self._hosts(rank)
        self._namespace(name)
        ends = ["name", INTERFACE, "type", "veth", "peer", "name", port, "netns", self._switch]
        self._ip(name, "link", "add", *ends)
        self._ip(self._switch, "link", "set", port, "master", "switch", "up")
        self._ip(name, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
        self._ip(name, "link", "set", INTERFACE, "up")
        self._ip(name, "link", "set", "lo", "up")

    def _namespace(self, name: str) -> None:
        # Registered before it is made: an interrupt may come in between.
        self._undo.callback(_remove_namespace, name)
        _run(["ip", "netns", "add", name])

    def _hosts(self, rank: int) -> None:
        """Let the host's own name resolve to the link's address, which gloo binds to."""
        folder = HOSTS / self._name(rank)
        if not HOSTS.exists():
            self._undo.callback(_remove_if_empty, HOSTS)
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        lines = ("127.0.0.1 localhost", f"{self.address(rank)} {socket.gethostname()}")
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _ip(self, name: str, *command: str) -> None:
        _run(["ip", "-n", name, *command])


class Loopback:
    """The same interface without namespaces and limits, for machines that cannot make them."""

    interface = None

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def enter(self, rank: int) -> list[str]:
        return []

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def limit(self, mbit: int | None) -> None:
        if mbit is not None:
            raise ValueError(
                f"Loopback: mbit must be None, got {mbit}. Use Links, as root, for a limit."
            )


def exit_on_termination() -> None:
    """Make SIGTERM unwind the program as Ctrl-C does, so that namespaces are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _remove_namespace(name: str) -> None:
    """Remove a namespace; its interfaces and the far ends of its links go with it."""
    if pathlib.Path("/run/netns", name).exists():
        _run(["ip", "netns", "delete", name])


def _remove_if_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
