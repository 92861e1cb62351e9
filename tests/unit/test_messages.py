"""What errors and warnings say to a user, read from the source."""

from __future__ import annotations

import re

from helpers.messages import messages

INTERNAL = re.compile(
    r"GuardOnDataDependent|SymNode|SymInt|\bu0\b|unknown line|\bdealt\b|\bled\b|\blifted\b"
)


def test_no_internal_words() -> None:
    found = list(messages())
    assert len(found) > 300
    assert not [each for each in found if INTERNAL.search(each.text)]
