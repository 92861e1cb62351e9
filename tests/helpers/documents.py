"""README and ``docs/`` as data: their links, headings, snippets and commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
COMMAND = "graphpipe"
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Snippet:
    """A fenced block.

    Attributes:
        language: as the fence names it.
        text: without the indentation of a list that it stands in.
        place: page and line.
    """

    language: str
    text: str
    place: str


def snippets(page: Path, language: str) -> list[Snippet]:
    """The blocks of a language on a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            language,
            textwrap.dedent(match[3]),
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}",
        )
        for match in FENCE.finditer(text)
        if match[2] == language
    ]


def prose(page: Path) -> str:
    """A page without its blocks, paragraphs in one line."""
    return re.sub(r"\n(?=\S)", " ", FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page."""
    return LINK.findall(SPAN.sub("", FENCE.sub("", page.read_text(encoding="utf-8"))))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may say behind ``#``."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", each).strip().replace(" ", "-") for each in headings}


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every call of the console command: where it stands, and its arguments."""
    for block in snippets(page, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and ASSIGNMENT.fullmatch(words[0]):
                del words[0]
            if words[:1] == [COMMAND]:
                yield block.place, words[1:]
    for span in SPAN.findall(prose(page)):
        words = shlex.split(span) if span.count("'") % 2 == 0 else []
        while words and ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        if words[:1] == [COMMAND] and "…" not in span:
            yield page.name, words[1:]


def scripts(page: Path) -> set[str]:
    """Files of this repository that a page tells to run."""
    return set(re.findall(r"(?:python |\b)(benchmarks/\w+\.\w+)", page.read_text(encoding="utf-8")))
