"""Delays Ctrl-C while something must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class HeldInterrupt:
    """Delays Ctrl-C until the current work has ended; a second Ctrl-C is not delayed.

    Elsewhere than in the main thread, or where somebody answers Ctrl-C already, nothing changes.
    """

    def __init__(self) -> None:
        self._came = False

    def hold(self) -> None:
        """Holds Ctrl-C from now on; a second call changes nothing."""
        is_main = threading.current_thread() is threading.main_thread()
        is_free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_main and is_free and not self._came:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        self._came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def let_go(self) -> None:
        """Stops holding; a Ctrl-C that came is dropped, as an error ends the run anyway."""
        self._came = False
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def answer(self) -> None:
        """Stops holding, and answers.

        Raises:
            KeyboardInterrupt: Ctrl-C came meanwhile.
        """
        came = self._came
        self.let_go()
        if came:
            raise KeyboardInterrupt


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C in the body is answered after it.

    Raises:
        KeyboardInterrupt: after the body, if it came.
    """
    held = HeldInterrupt()
    held.hold()
    try:
        yield
    except BaseException:
        held.let_go()
        raise
    held.answer()
