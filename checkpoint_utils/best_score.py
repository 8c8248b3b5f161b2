"""The best validation score so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class BestScore:
    """The best validation score so far, and for how many validations it has stood.

    A score counts once per update, however often it is given. None, NaN and infinities are no scores. Of equal scores
    the earlier stays the best.

    best: None until there is one. best_num_updates: its update. num_updates: that of the last score, None before it.
    """

    def __init__(self, maximize: bool = False) -> None:
        self.maximize = maximize
        self.reset()

    def reset(self) -> None:
        self.best: float | None = None
        self.best_num_updates: int | None = None
        self.num_updates: int | None = None
        self.runs_without_improvement = 0

    def update(self, score: float | None, num_updates: int) -> bool:
        """Take the score of this update. Returns whether it is the best so far."""
        if not is_score(score):
            return False
        if self.num_updates == num_updates:
            return self.best_num_updates == num_updates
        self.num_updates = num_updates
        if self.best is None or is_better(float(score), self.best, self.maximize):
            self.best, self.best_num_updates, self.runs_without_improvement = float(score), num_updates, 0
            return True
        self.runs_without_improvement += 1
        return False

    def out_of_patience(self, patience: int) -> bool:
        return 0 < patience <= self.runs_without_improvement

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_num_updates": self.best_num_updates,
            "num_updates": self.num_updates,
            "runs_without_improvement": self.runs_without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if state.get("best") is not None:
            self.best = float(state["best"])
            self.best_num_updates = state.get("best_num_updates")
            self.num_updates = state.get("num_updates")
            self.runs_without_improvement = int(state.get("runs_without_improvement") or 0)


def is_score(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def is_better(score: float, other: float, maximize: bool) -> bool:
    return score > other if maximize else score < other
