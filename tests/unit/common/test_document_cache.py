from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from lightning_gpp.common.document_cache import DocumentCache, default_folder

KEY = {"model": "m", "size": 4}


@pytest.fixture
def cache(tmp_path: Path) -> DocumentCache:
    return DocumentCache(tmp_path / "cache")


def test_what_was_written_is_read(cache: DocumentCache):
    assert cache.read("profile", KEY, str) is None
    cache.write("profile", KEY, "text")
    assert cache.read("profile", dict(reversed(KEY.items())), str) == "text"
    assert [path.name for path in cache.folder.iterdir()] == [cache.path("profile", KEY).name]


@pytest.mark.parametrize("other", [{"model": "n", "size": 4}, {"model": "m"}, {}])
def test_another_key_is_a_miss(cache: DocumentCache, other: dict):
    cache.write("profile", KEY, "text")
    assert cache.read("profile", other, str) is None
    assert cache.read("plan", KEY, str) is None


def test_a_file_with_another_key_is_no_hit(cache: DocumentCache, caplog):
    cache.write("profile", {"model": "n"}, "wrong")
    os.replace(cache.path("profile", {"model": "n"}), cache.path("profile", KEY))
    assert cache.read("profile", KEY, str) is None
    assert "its key is another one" in caplog.text


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda text: text[: len(text) // 2], "Unterminated string|Expecting"),
        (lambda text: text.replace('"version": 1', '"version": 9'), 'expected "format"'),
        (lambda text: text.replace('"text"', "3"), 'expected a text at "document"'),
        (lambda text: text.replace('"text"', '"other"'), "no number"),
        (lambda text: "[]", 'expected "format"'),
    ],
)
def test_broken_files_are_reported_and_made_again(cache: DocumentCache, caplog, break_it, reason):
    def parse(text: str) -> str:
        if text != "text":
            raise ValueError("no number")
        return text

    cache.write("profile", KEY, "text")
    path = cache.path("profile", KEY)
    path.write_text(break_it(path.read_text()))
    assert cache.read("profile", KEY, parse) is None
    assert f"the cached profile {path} is broken and is made again" in caplog.text
    assert any(part in caplog.text for part in reason.split("|"))
    cache.write("profile", KEY, "text")
    assert cache.read("profile", KEY, parse) == "text"


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
        seen.add(cache.read("p", KEY, str))
    for writer in writers:
        writer.join()
    assert seen - {None} <= set(texts)
    assert len(list(cache.folder.iterdir())) == 2  # nothing is left aside


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = DocumentCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        cache.write("profile", KEY, "text")
    assert "the profile cannot be kept in" in caplog.text
    assert cache.read("profile", KEY, str) is None


def test_the_key_can_be_read_by_a_person(cache: DocumentCache):
    cache.write("profile", KEY, "text")
    assert json.loads(cache.path("profile", KEY).read_text())["key"] == KEY


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert "lightning-gpp-tests-" in str(default_folder())  # tests keep away from the user's
    monkeypatch.setenv("LIGHTNING_GPP_CACHE", "")
    assert default_folder() is None
    monkeypatch.delenv("LIGHTNING_GPP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert default_folder() == tmp_path / "lightning_gpp"
