"""What is done about an update whose loss, gradient or parameter is not finite: `common.on_nonfinite`.

    stop       the run ends with an error that names the culprit; nothing was changed, nothing is saved
    skip       the update is left out: nothing changes but the data position, and it is counted
    rollback   the run goes back to its newest checkpoint and on behind the data that lie between, and it is counted

Owns: the search for the culprit, the count (which is state, so that a resumed run counts on), the update of the
checkpoint that a rollback goes back to. All of it is a function of the position: a run that was stopped anywhere and
continued does the same as one that was not.
Must not know: the Trainer, the optimizer, files. fp16's overflows are not its business (precision.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import distributed_utils
from trainer.errors import NonFiniteError
from trainer.health import first_non_finite


class NonFinitePolicy:
    """Counts the updates of a run that were not finite, and says what becomes of each.

    Args: common: the section `common`. group: of the ranks, None for one.
    """

    def __init__(self, common: Any, group: Any) -> None:
        self.action, self.limit, self._group = common.on_nonfinite, common.max_nonfinite, group
        self.count = 0
        self.healthy_at: int | None = None  # update of the newest checkpoint that was due by position, not by a request
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def goes_back(self) -> bool:
        return self.action == "rollback"

    @property
    def can_go_back(self) -> bool:
        return self.goes_back and self.healthy_at is not None

    def begin_update(self, buffers: Callable[[], list[Tensor]]) -> None:
        """Keep the buffers, which forward changes, as far as they may have to be put back."""
        if self.action != "stop":
            self._buffers = [(buffer, buffer.clone()) for buffer in buffers()]

    @torch.no_grad()
    def _put_back_buffers(self) -> None:
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def meet(
        self,
        samples: list,
        try_again: Callable[[int, Any], str | None],
        named_parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        num_updates: int,
    ) -> NonFiniteError:
        """The update behind `num_updates` is not finite. Collective. Returns the error where it is skipped.

        try_again: runs micro-batch i of this rank once more and says what of it is not finite.
        Raises: on all ranks NonFiniteError that names the first culprit, unless the update may be skipped.
        """
        self._put_back_buffers()
        what, micro_batch = self._first(first_non_finite(named_parameters()), "parameter {}"), None
        is_parameter = what is not None
        for i, sample in enumerate(samples if what is None else ()):
            what, micro_batch = self._first(try_again(i, sample)), i
            self._put_back_buffers()
            if what is not None:
                break
        rank, name = what or (0, "the sum of the gradients over ranks and micro-batches")
        micro_batch = micro_batch if what is not None else None
        if self.action == "skip" and not is_parameter and self.count < self.limit:
            self.count += 1
            return NonFiniteError(name, num_updates + 1, rank, micro_batch)
        self.tell(NonFiniteError(name, num_updates + 1, rank, micro_batch, self._hint(is_parameter)))

    def _first(self, found: str | None, form: str = "{}") -> tuple[int, str] | None:
        """(rank, what) of the first rank that has found something."""
        told = distributed_utils.all_gather_list(found, self._group)
        return next(((rank, form.format(one)) for rank, one in enumerate(told) if one is not None), None)

    def _hint(self, is_parameter: bool) -> str:
        if self.goes_back:
            return ""
        if self.action == "skip" and not is_parameter:
            return self._limit_hint()
        if self.action == "skip":
            return (
                "No update can mend that, so that none is skipped. Nothing was saved; to go back to the newest "
                "checkpoint instead, add common.on_nonfinite=rollback."
            )
        other = "rollback" if is_parameter else "skip"
        return f"Nothing was changed or saved. To go on all the same, add common.on_nonfinite={other}."

    def _limit_hint(self) -> str:
        return (
            f"{self.count} updates of this run were not finite before, and common.max_nonfinite={self.limit}. Nothing was "
            f"changed or saved; lower optimization.lr or look at the data, or add common.max_nonfinite={2 * self.limit + 1}."
        )

    def check_parameters(self, named_parameters: Iterable[tuple[str, Tensor]], num_updates: int) -> None:
        """Collective, before a save. Raises NonFiniteError on all ranks if a parameter is not finite on one."""
        what = self._first(first_non_finite(named_parameters), "parameter {}")
        if what is not None:
            rank, name = what
            hint = "A healthy checkpoint is never replaced by such a one: nothing was saved."
            if self.action != "rollback":
                hint += " To go back to the newest one and on, add common.on_nonfinite=rollback."
            self.tell(NonFiniteError(name, num_updates, rank, hint=hint))

    def tell(self, error: NonFiniteError) -> None:
        """Raise the error of the rank that it names: where the ranks go back together all raise it themselves."""
        if self.goes_back:
            raise distributed_utils.agreed(error)
        distributed_utils.agree(error if error.rank == distributed_utils.get_rank(self._group) else None, self._group)

    def count_rollback(self, error: NonFiniteError) -> None:
        """Raises: NonFiniteError where the run has gone back often enough."""
        if self.count >= self.limit:
            what, rest = error.what, (error.num_updates, error.rank, error.micro_batch)
            raise distributed_utils.agreed(NonFiniteError(what, *rest, self._limit_hint())) from error
        self.count += 1

    @contextlib.contextmanager
    def saving(self, num_updates: int | None) -> Iterator[None]:
        """Around a save that is due by position (None: by a request): where it goes well a rollback goes back to it."""
        before = self.healthy_at
        if num_updates is not None:
            self.healthy_at = num_updates
        try:
            yield
        except BaseException:
            self.healthy_at = before
            raise

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "healthy_at": self.healthy_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.healthy_at = int(state.get("count") or 0), state.get("healthy_at")
