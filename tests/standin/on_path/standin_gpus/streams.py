"""``torch.cuda.Stream`` and ``Event``, on torch's classes for any accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.cuda

from standin_gpus.library import LIBRARY, current_device, device_index, set_current_device

CUDA = 1
"""The type of a device in ``c10::DeviceType``."""


class Stream(torch.Stream):
    """A queue of a device."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
        if known:
            return super().__new__(cls, **known)
        torch.cuda._lazy_init()
        return super().__new__(cls, device=torch.device("cuda", device_index(device)))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """A place in a queue."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(_current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        (_current_stream() if stream is None else stream).wait_event(self)


@contextmanager
def held(device: Any = None) -> Iterator[None]:
    """The current stream of a device does nothing meanwhile of what it is given."""
    hold = LIBRARY.standin_hold(device_index(device))
    try:
        yield
    finally:
        LIBRARY.standin_let_go(hold)


class StreamContext:
    """Makes a stream the current one of its device, and its device the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = current_device()
            self._before = _current_stream(self.stream.device_index)
            torch.accelerator.set_stream(self.stream)
            set_current_device(self.stream.device_index)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._before)
            set_current_device(self._device)


def apply() -> None:
    """Patches streams and events."""
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": torch.accelerator.set_stream,
    }.items():
        setattr(torch.cuda, name, value)
    torch.cuda.streams.Stream, torch.cuda.streams.Event = Stream, Event
    torch._C._cuda_getCurrentRawStream = lambda index: _current_stream(index).stream_id
    torch._C._cuda_set_sync_debug_mode = lambda mode: None  # waits.py counts them


def _current_stream(device: Any = None) -> Stream:
    torch.cuda._lazy_init()
    found = torch.accelerator.current_stream(torch.device("cuda", device_index(device)))
    return _stream(found.stream_id, found.device_index)


def _default_stream(device: Any = None) -> Stream:
    return _stream(0, device_index(device))


def _stream(stream_id: int, index: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=index, device_type=CUDA)
