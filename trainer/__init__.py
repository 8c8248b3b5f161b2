"""fairtrain: a trainer whose runs continue exactly. `from trainer import Trainer`."""

from __future__ import annotations

__all__ = ["Trainer"]


def __getattr__(name: str):
    # Parts such as `trainer.lr_scheduler` are imported alone by tools and tests; the Trainer comes only when asked for.
    if name == "Trainer":
        from trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
