"""Two hosts on one machine: network namespaces, joined by a link of their own.

It takes the rights to make them (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN) and the command ``ip``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


class NoNamespacesError(RuntimeError):
    """This machine makes no network namespaces."""


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        name: of its namespace.
        address: of it on the link.
        link: name of its end.
    """

    name: str
    address: str
    link: str

    def command(self, command: list[str]) -> list[str]:
        """The same on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    @property
    def environment(self) -> dict[str, str]:
        """What processes on it need to find the others."""
        return {"GLOO_SOCKET_IFNAME": self.link}


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts while the body runs.

    Raises:
        NoNamespacesError: this machine makes none; the text says why.
    """
    if shutil.which("ip") is None:
        raise NoNamespacesError("there is no command `ip`")
    number = os.getpid()
    first, second = (
        Host(f"gpp{number}-{i}", f"10.77.0.{i + 1}", f"gpp{number % 10**6}-{i}") for i in range(2)
    )
    with ExitStack() as stack:
        for host in (first, second):
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
        ends = ["peer", "name", second.link, "netns", second.name]
        _ip("link", "add", first.link, "netns", first.name, "type", "veth", *ends)
        for host in (first, second):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            for link in ("lo", host.link):
                _ip("-n", host.name, "link", "set", link, "up")
        yield first, second


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
