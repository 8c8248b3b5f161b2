"""What rank 0 does for all."""

from __future__ import annotations

from typing import Any

import checkpoint_file
import distributed_utils


def on_rank_0(do: Any, group: Any, share: bool = True) -> Any:
    """Let rank 0 do it; all ranks get its result (share) and all raise if it failed. Results are plain values."""
    result, error = None, None
    if distributed_utils.get_rank(group) == 0:
        try:
            result = do()
        except Exception as problem:  # raised on all ranks right below
            error = problem
    told = checkpoint_file.told_by_rank_0(error, result if share else None, group)
    return told if share else result
