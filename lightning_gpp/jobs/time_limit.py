"""Calls that are ended at a time limit, whatever they are doing.

A search is pure Python (or numpy) for minutes and looks at no clock, so it runs in a process of its
own, which can be ended.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Result = TypeVar("Result")


class OutOfTimeError(ValueError):
    """A call took longer than its limit."""


def call_within(limit_s: float | None, function: Callable[..., Result], *args: Any) -> Result:
    """What a function returns, called in a new process, or in this one where there is no limit.

    Args:
        limit_s: seconds after which the process is ended, its start included; None: never.
        function: of the top level of a module; it, the arguments and the result are pickled.
        args: its arguments.

    Raises:
        OutOfTimeError: there was no result in time.
        ValueError: of the function, with its text; that is an answer, too.
        RuntimeError: the function raised another error, whose traceback is in the text, or its
            process ended without a result.
    """
    if limit_s is None:
        return function(*args)
    spawn = multiprocessing.get_context("spawn")  # nothing of this process's threads and locks
    receive, send = spawn.Pipe(duplex=False)
    worker = spawn.Process(target=_call, args=(send, function, args))
    worker.start()
    send.close()
    try:
        if not receive.poll(limit_s):
            raise OutOfTimeError(
                f"no answer within {limit_s:g} s; a larger job.limit_s gives it longer"
            )
        error, answer = receive.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(
            f"the process of {function.__name__} ended without an answer, with exit code "
            f"{worker.exitcode} (-9: ended from outside, as where memory runs out)"
        ) from None
    finally:
        worker.kill()
        worker.join()
        receive.close()
    if error is ValueError:
        raise ValueError(answer)
    if error is not None:
        raise RuntimeError(f"{function.__name__} failed in a process of its own:\n{answer}")
    result: Result = answer
    return result


def _call(send: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    """Sends the kind of an error, and its text, as not every error can be pickled."""
    answer: tuple[type[Exception] | None, object]
    try:
        answer = None, function(*args)
    except ValueError as refused:
        answer = ValueError, str(refused)
    except Exception:
        answer = Exception, traceback.format_exc()
    send.send(answer)
