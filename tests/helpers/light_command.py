"""The real command in a process of its own, which must not import the heavy libraries."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "lightning", "networkx", "scipy")


def printed_without_heavy_imports(*overrides: str, also: tuple[str, ...] = ()) -> str:
    """What ``graphpipe`` prints; fails where it fails, or imports what it can do without.

    Args:
        overrides: of the command.
        also: modules that it can do without, besides those that no planning job needs.
    """
    code = (
        f"import sys; sys.argv = ['graphpipe', *{overrides}]\n"
        "from lightning_gpp.cli import main; main()\n"
        f"print([n for n in {HEAVY + also} if n in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    return done.stdout
