from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_gpp.common.document_cache import DocumentCache

KEY = {"model": "m", "size": 4}


@pytest.fixture
def cache(tmp_path: Path) -> DocumentCache:
    return DocumentCache(tmp_path / "cache")


def found(cache: DocumentCache, kind: str, key: dict = KEY) -> str | None:
    read = cache.read(kind, key, str)
    return None if read is None else read[0]


def test_what_was_written_is_read(cache: DocumentCache):
    assert found(cache, "profile") is None
    cache.write("profile", KEY, "text")
    read = cache.read("profile", dict(reversed(KEY.items())), str)
    assert read is not None and read[0] == "text"
    assert list(cache.folder.iterdir()) == [read[1]]


@pytest.mark.parametrize("other", [{"model": "n", "size": 4}, {"model": "m"}, {}])
def test_another_key_is_a_miss(cache: DocumentCache, other: dict):
    cache.write("profile", KEY, "text")
    assert found(cache, "profile", other) is None
    assert found(cache, "plan") is None


def test_broken_files_are_reported_and_made_again(cache: DocumentCache, caplog):
    def parse(text: str) -> str:
        if text != "text":
            raise ValueError("no number")
        return text

    cache.write("profile", KEY, "other")
    (path,) = cache.folder.iterdir()
    for broken in (b"other", b"\xff"):
        path.write_bytes(broken)
        assert cache.read("profile", KEY, parse) is None
        assert f"the cached profile {path} is broken and is made again" in caplog.text
        caplog.clear()
    cache.write("profile", KEY, "text")
    assert cache.read("profile", KEY, parse) == ("text", path)


def test_readers_never_see_half_a_file(cache: DocumentCache):
    """Two writers, a long and a short document; a reader sees one or the other."""
    texts = ("a" * 100_000, "b")
    cache.write("profile", KEY, texts[0])
    writers = [
        threading.Thread(target=lambda text=text: [cache.write("p", KEY, text) for _ in range(50)])
        for text in texts
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(found(cache, "p"))
    for writer in writers:
        writer.join()
    assert seen - {None} <= set(texts)
    assert len(list(cache.folder.iterdir())) == 2  # nothing is left aside
