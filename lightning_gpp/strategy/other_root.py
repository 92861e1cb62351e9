"""A clear message for modules of the other copy of Lightning.

``pytorch_lightning`` and ``lightning.pytorch`` are two copies of one library whose classes do not
mix. The Trainer refuses a module of the other copy before a strategy is asked, and takes a user's
own sub-class for no LightningModule at all; only the text of that error is changed here.
"""

from __future__ import annotations

from lightning_gpp.strategy.lightning_private import check_mixed_imports, compile_utilities

_OTHER = "pytorch_lightning."


def refuse_other_root(model: object) -> None:
    """Raises where ``model`` descends from ``pytorch_lightning``; else does what Lightning does.

    Raises:
        TypeError: says which import to change.
    """
    if any(base.__module__.startswith(_OTHER) for base in type(model).__mro__):
        raise TypeError(
            f"{type(model).__name__} is a LightningModule of `pytorch_lightning`, but this Trainer "
            "is from `lightning.pytorch`; they are separate copies and do not mix. Replace "
            "`import pytorch_lightning as pl` by `import lightning.pytorch as pl`."
        )
    check_mixed_imports(model)


def install() -> None:
    """Makes the Trainer use :func:`refuse_other_root`."""
    setattr(compile_utilities, "_check_mixed_imports", refuse_other_root)  # noqa: B010
