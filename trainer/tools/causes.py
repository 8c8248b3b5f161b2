"""Why two runs that should be equal are not: by where they first differ, and by further runs with one thing changed.

Owns: the list of causes, the trial that proves each, the words and the way out. Must not know: how runs are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.tools.traced import FROZEN_CLOCK
from trainer.tools.traces import Difference, Trace, first_difference, kept_differences

CAUSES = {  # name: (in words, way out)
    "unordered sets": (
        "the order of a set (or of hashes) of text, which each process chooses anew (PYTHONHASHSEED)",
        "sort what comes out of a set, such as sorted(names), before it decides an order",
    ),
    "workers": (
        "something that data-loading workers keep or know: state of their own, or the number of the worker",
        "make __getitem__ a function of the index and of torch's, numpy's and random's global generators, which are seeded "
        "by (seed, epoch, index); or dataset.num_workers=0",
    ),
    "nondeterministic kernels": (
        "kernels that add up in another order from run to run",
        "common.deterministic=true, with common.num_threads fixed on CPUs",
    ),
    "wall-clock": (
        "the time of day",
        "take time out of what is computed: use get_num_updates() or the index in its place",
    ),
    "entropy": (
        "a generator that nobody seeds, such as numpy.random.default_rng() or random.SystemRandom()",
        "draw from torch's, numpy's or random's global generators, which are seeded by the position before each micro-batch "
        "and each sample",
    ),
    "RNG not by position": (
        "a generator of its own, which a new process finds at its beginning",
        "draw from torch's, numpy's or random's global generators, which are seeded by the position; or seed one anew each "
        "time, by trainer.randomness.derive_seed(..., num_updates or index)",
    ),
    "state not in task_state_dict": (
        "something that is remembered and not saved",
        "return it from task_state_dict() and take it back in load_task_state_dict(), or derive it from get_num_updates()",
    ),
    "not restored": (
        "a tensor that is not what was saved once it is loaded",
        "see upgrade_state_dict(), load_task_state_dict() and whatever else changes it between building and training",
    ),
    "unknown": ("none that was tried", "compare the two runs with --keep DIR and fairtrain-checkpoint diff"),
}
# A thing that makes twins differ, and the trial in which it cannot: more overrides, environment.
TRIALS: tuple[tuple[str, str, tuple[str, ...], dict[str, str]], ...] = (
    ("unordered sets", "with PYTHONHASHSEED=0 in both", (), {"PYTHONHASHSEED": "0"}),
    ("workers", "with dataset.num_workers=0 in both", ("dataset.num_workers=0",), {}),
    (
        "nondeterministic kernels",
        "with common.deterministic=true common.num_threads=1 in both",
        ("common.deterministic=true", "common.num_threads=1"),
        {},
    ),
    ("wall-clock", "with a clock that stands still in both", (), {FROZEN_CLOCK: "1700000000"}),
)


@dataclass
class Outcome:
    """The traces of a run that never stopped and of one that was stopped after `num_before` updates and continued."""

    whole: Trace
    continued: Trace
    num_before: int


@dataclass
class Finding:
    difference: Difference | None
    cause: str | None = None
    evidence: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)

    @property
    def cause_in_words(self) -> str:
        return f"{self.cause}: {CAUSES[self.cause][0]}" if self.cause else ""

    @property
    def way_out(self) -> str:
        return CAUSES[self.cause][1] if self.cause else ""

    def as_dict(self) -> dict[str, Any]:
        difference = vars(self.difference) if self.difference is not None else None
        return {
            "exact": self.difference is None,
            "first_difference": difference,
            "cause": self.cause,
            "way_out": self.way_out,
            "evidence": self.evidence,
            "warnings": self.warnings,
            "compared": self.compared,
        }


def explain(outcome: Outcome, trials: Any) -> Finding:
    """Compare, and where the runs differ find out why. trials: starts further runs, `twins` and `three`."""
    difference = first_difference(outcome.whole, outcome.continued)
    kept = kept_differences(outcome.whole, outcome.continued, outcome.num_before + 1)
    if difference is None:
        return _without_difference(outcome, trials, kept)
    if difference.update <= outcome.num_before:
        return _of_twins(difference, trials)
    return _of_the_resume(difference, outcome, kept, trials)


def _without_difference(outcome: Outcome, trials: Any, kept: list[tuple[str, str, str]]) -> Finding:
    updates = outcome.whole.updates[0]
    tensors = len(next(iter(updates.values()))["state"]) - 2  # without task state and learning rate
    compared = [
        f"the samples and numbers of {len(updates)} updates",
        f"{tensors} tensors after each",
        "the last checkpoint",
    ]
    saved = trials.saved_differences(outcome.whole, outcome.continued)
    if saved:
        name = saved[0]
        after = Difference(max(updates), 0, "state", f"{name} of the last checkpoint", "saved", "saved otherwise")
        return Finding(
            after,
            _cause_of_kept(kept) or "unknown",
            [f"{len(saved)} entries differ: {', '.join(saved[:5])}", *_shown(kept)],
        )
    warnings = [
        f"kept beside the checkpoint, and without effect on the numbers so far: {line}" for line in _shown(kept)
    ]
    return Finding(None, None, [], warnings, compared)


def _of_twins(difference: Difference, trials: Any) -> Finding:
    """Two runs from nothing differ: no resume is needed for that."""
    evidence = ["two new runs differ before any stop, so that the resume is not to blame"]
    for cause, what, overrides, env in TRIALS:
        if _twins_agree(trials, overrides, env):
            return Finding(difference, cause, [*evidence, f"{what} they are equal"])
        evidence.append(f"{what} they still differ")
    return Finding(difference, "entropy", evidence)


def _twins_agree(trials: Any, overrides: Sequence[str], env: dict[str, str]) -> bool:
    one, other = trials.twins(overrides, env)
    return first_difference(one, other) is None


def _of_the_resume(difference: Difference, outcome: Outcome, kept: list[tuple[str, str, str]], trials: Any) -> Finding:
    evidence = [f"up to update {outcome.num_before}, before the stop, both runs are equal"]
    if kept:
        return Finding(difference, _cause_of_kept(kept), [*evidence, *_shown(kept)])
    if difference.stage == "start":
        return Finding(difference, "not restored", evidence)
    if outcome.whole.has_workers:
        overrides = ("dataset.num_workers=0",)
        whole, continued = trials.three(overrides)
        if first_difference(whole, continued) is None:
            return Finding(difference, "workers", [*evidence, f"with {overrides[0]} they are equal to the end"])
        kept = kept_differences(whole, continued, outcome.num_before + 1)
        if kept:  # what workers had copies of
            return Finding(difference, _cause_of_kept(kept), [*evidence, *_shown(kept)])
    cause, more = _by_trials_of_three(trials)
    return Finding(difference, cause, [*evidence, *more])


def _by_trials_of_three(trials: Any) -> tuple[str, list[str]]:
    tried = []
    for cause, what, overrides, env in TRIALS:
        if cause == "workers":
            continue
        if first_difference(*trials.three(overrides, env)) is None:
            return cause, [*tried, f"{what} they are equal to the end"]
        tried.append(f"{what} they still differ")
    return "unknown", tried


def _cause_of_kept(kept: list[tuple[str, str, str]]) -> str | None:
    if not kept:
        return None
    is_generator = any(a.startswith("generator ") for _, a, _ in kept)
    return "RNG not by position" if is_generator else "state not in task_state_dict"


def _shown(kept: list[tuple[str, str, str]], count: int = 5) -> list[str]:
    generators_first = sorted(kept, key=lambda one: not one[1].startswith("generator "))
    lines = [f"{name} is {a} in the run that went on, {b} after the resume" for name, a, b in generators_first[:count]]
    return lines + ([f"and {len(kept) - count} more such values"] if len(kept) > count else [])
