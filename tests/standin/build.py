"""Builds the native libraries of the stand-in, once for a torch, a Python and their sources.

``python tests/standin/build.py`` builds and names the folder. Imports the standard library only,
as it runs before torch is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
TORCH = "2.13"
"""The torch that the sources are written for: they use what has no stable interface."""
CACHE = "LIGHTNING_GPP_STANDIN_CACHE"
"""Environment variable: where built libraries are kept, in place of the user's cache folder."""
NCCL = "nccl.cpp"
"""A library of its own, as it needs Python; the other sources are needed before torch is."""
FLAGS = ("-std=c++20", "-O0", "-g0", "-fPIC", "-fvisibility-inlines-hidden")


def obstacle() -> str | None:
    """Why the stand-in cannot be here, if it cannot."""
    torch = importlib.metadata.version("torch")
    if sys.platform != "linux":
        return f"the stand-in for GPUs is built on Linux only, not on {sys.platform}"
    if not torch.startswith(f"{TORCH}."):
        return f"the stand-in for GPUs is written for torch {TORCH}, installed is {torch}"
    if "+cu" in torch or "+rocm" in torch:
        return f"the stand-in for GPUs needs a torch without GPUs, installed is {torch}"
    if is_built():
        return None
    if shutil.which("g++") is None:
        return "the stand-in for GPUs needs g++ to be built"
    if not _python_headers().joinpath("Python.h").exists():
        return "the stand-in for GPUs needs Python's headers to be built"
    return None


def is_built() -> bool:
    """Whether the libraries are there."""
    return folder().exists()


def folder() -> Path:
    """Where the libraries of these sources, this torch and this Python lie, built or not."""
    given = os.environ.get(CACHE)
    user = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return (Path(given) if given else user / "lightning_gpp" / "standin") / _key()


def build() -> Path:
    """Builds what is not there; one process builds, others wait for it."""
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                made = Path(scratch, "made")
                made.mkdir()
                _build_in(made)
                made.rename(target)
    return target


def _key() -> str:
    """A name for what the libraries depend on."""
    parts = [importlib.metadata.version("torch"), sys.version, *FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build_in(made: Path) -> None:
    torch = Path(importlib.util.find_spec("torch").origin).parent
    includes = (torch / "include", torch / "include/torch/csrc/api/include", _python_headers())
    flags = [*FLAGS, *(f"-I{path}" for path in includes)]

    def compiled(source: str) -> str:
        _run("g++", "-c", *flags, str(SOURCES / source), "-o", str(made / f"{source}.o"))
        return str(made / f"{source}.o")

    # The longest compilation first.
    sources = sorted((path.name for path in SOURCES.glob("*.cpp")), key=lambda name: name != NCCL)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        nccl, *device = threads.map(compiled, sources)
    link = ("g++", "-shared", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}")
    libraries = ("-lc10", "-ltorch_cpu")
    _run(*link, *device, "-o", str(made / "libstandin.so"), *libraries)
    libraries = (f"-L{made}", "-Wl,-rpath,$ORIGIN", "-lstandin", *libraries)
    libraries = (*libraries, "-ltorch", "-ltorch_python")
    _run(*link, nccl, "-o", str(made / "standin_nccl.so"), *libraries)
    for path in made.glob("*.o"):
        path.unlink()


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the stand-in for GPUs cannot be built:\n{ended.stderr[-8000:]}")


if __name__ == "__main__":
    sys.stdout.write(f"{obstacle() or build()}\n")
