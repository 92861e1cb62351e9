"""Ctrl-C that comes in the midst of what must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_later(after_s: float = 0.0) -> Iterator[None]:
    """Ctrl-C in the body is answered after it; a second one at once.

    Elsewhere than in the main thread, or where somebody answers Ctrl-C already, nothing changes.

    Args:
        after_s: seconds after the body, in which what follows it at once ends as well.

    Raises:
        KeyboardInterrupt: after the body, if it came.
    """
    before, held = signal.getsignal(signal.SIGINT), list[int]()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is not signal.default_int_handler:
        yield
        return

    def hold(number: int, _: object) -> None:
        held.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held and after_s:
        main = threading.get_ident()
        threading.Timer(after_s, signal.pthread_kill, (main, held[0])).start()
    elif held:
        raise KeyboardInterrupt
