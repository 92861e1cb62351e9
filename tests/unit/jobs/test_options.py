"""Options as Hydra hands them over: whatever the value looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_gpp.jobs.options import (
    as_flag,
    as_limit_s,
    as_list,
    as_mapping,
    as_text,
)


def of(text: str) -> Any:
    """The value of ``x=text`` on a command line."""
    return OmegaConf.from_dotlist([f"x={text}"]).x


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (as_list, "graphpipe", ["graphpipe"]),
        (as_list, "[graphpipe,piper]", ["graphpipe", "piper"]),
        (as_list, "4", [4]),
        (as_list, "[]", []),
        (as_list, "null", None),
        (as_mapping, "{3: 0.5}", {"3": 0.5}),
        (as_mapping, "null", {}),
        (as_text, "a.json", "a.json"),
        (as_text, "null", None),
        (as_flag, "true", True),
        (as_limit_s, "null", None),
        (as_limit_s, "60", 60.0),
    ],
)
def test_values(read: Callable[[str, Any], Any], text: str, value: Any) -> None:
    assert read("option", of(text)) == value


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (as_list, "{a: 1}", r"a list, got \{'a': 1\}"),
        (as_mapping, "3", r"a mapping \{name: value\}, got 3"),
        (as_mapping, "[1]", r"a mapping \{name: value\}, got \[1\]"),
        (as_text, "5", "a name or a path, got 5"),
        (as_text, "[a,b]", r"a name or a path, got \['a', 'b'\]"),
        (as_flag, "maybe", "true or false, got 'maybe'"),
        (as_flag, "1", "true or false, got 1"),
        (as_limit_s, "x", "a number of seconds above 0, or null, got 'x'"),
        (as_limit_s, "0", "a number of seconds above 0, or null, got 0"),
    ],
)
def test_mistakes_name_the_option(
    read: Callable[[str, Any], Any], text: str, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"job.option: expected {expected}"):
        read("job.option", of(text))
