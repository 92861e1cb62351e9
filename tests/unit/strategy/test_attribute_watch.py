"""Which attributes are set while a watch is on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from lightning_gpp.strategy.state.attribute_watch import MISSING, AttributeWatch


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.1


@pytest.fixture
def watch() -> Iterator[AttributeWatch]:
    watch = AttributeWatch()
    yield watch
    watch.remove()


def test_says_what_was_and_what_is(watch: AttributeWatch) -> None:
    """Of what is set twice the first value was before; what is set to the same is no change."""
    module, other = Known(), Known()
    with watch.on():
        module.rate = 0.2
        module.rate = 0.3
        module.mode = "late"
        module.training = True
        other.rate = 7.0
    module.rate = 0.4
    found = list(watch.changed({id(module): ("head", module)}))
    assert found == [("head", "rate", 0.1, 0.4), ("head", "mode", MISSING, "late")]
    with watch.on():
        assert not list(watch.changed({id(module): ("head", module)}))


def test_leaves_nothing_behind() -> None:
    """Also where the first of two watches is taken away first, as that of another Trainer is."""
    before = nn.Module.__setattr__
    first, second = AttributeWatch(), AttributeWatch()
    first.remove()
    module = Known()
    with second.on():
        module.rate = 1.0
    assert [now for *_, now in second.changed({id(module): ("", module)})] == [1.0]
    second.remove()
    assert nn.Module.__setattr__ is before
