"""The names of a file's tensors and those of this run's model: wrappers and prefixes are found and removed.

Owns: which part of a file fits the model, under which prefix, and when that is for the user to say.
Must not know: files, the Trainer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from trainer.state import StateError

# What wrappers put into names, wherever in them it stands: compile, FSDP, activation checkpointing.
WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module", "_forward_module"}
)
# Tensors that some programs keep beside the weights and that nobody needs: tables that are computed anew.
COMPUTED = re.compile(r"(^|\.)(version|_float_tensor|masked_bias|inv_freq|position_ids|attn\.bias|attention\.bias)$")


class AmbiguousNamesError(StateError):
    """The names of a file fit the model in several ways."""

    def __init__(self, path: str, fits: list[Fit]) -> None:
        self.path, self.fits = path, fits
        listed = ", ".join(f"{fit.prefix!r} ({fit.matches} tensors)" for fit in fits[:10])
        example = fits[0].prefix.replace(".", "[.]")
        super().__init__(
            f"{path}: {len(fits)} parts of it fit this model: the names that begin with {listed}. Say which one is meant: "
            f"'checkpoint.load_rename=[\"^{example} -> \"]'"
        )


@dataclass(frozen=True)
class Fit:
    """A way to see a file's names: without `prefix`, with `added` before them. `matches`: names that the model has."""

    prefix: str
    added: str
    matches: int
    shapes: int = 0
    renamed: int = 0

    def name_here(self, name: str) -> str | None:
        """The name in this run's model, before checkpoint.load_rename; None for a tensor of another part."""
        return self.added + name[len(self.prefix) :] if name.startswith(self.prefix) else None


def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def prefixes(name: str) -> list[str]:
    """'', 'a.', 'a.b.' of 'a.b.c'."""
    parts = name.split(".")
    return ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts))]


def find_fit(
    names: Mapping[str, tuple],
    wanted: Mapping[str, tuple],
    rename: Callable[[str], str] | None,
    preferred: Iterable[str],
    path: str,
) -> Fit:
    """How the file's names become those of the model.

    Args:    names, wanted: name -> shape, of the file and of the model.
             rename: checkpoint.load_rename, None where there is none.
             preferred: prefixes of the parts of the file in which the model usually stands, the usual first.
    Returns: the fit with most names in common, then most shapes, then a preferred part. Matches 0: nothing fits.
    Raises:  AmbiguousNamesError where several are equally good.
    """
    fits = renamed_fits(names, wanted, rename) if rename else plain_fits(names, wanted)
    order = [*preferred]
    if not fits:
        return Fit(order[0] if order else "", "", 0)

    def part(fit: Fit) -> int:
        return next((rank for rank, prefix in enumerate(order) if fit.prefix.startswith(prefix)), len(order))

    def score(fit: Fit) -> tuple:
        whole = fit.prefix in ("", *order) and not fit.added
        return fit.matches, fit.renamed, fit.shapes, -part(fit), whole

    best = max(score(fit) for fit in fits)
    equal = [fit for fit in fits if score(fit) == best]
    if len({fit.prefix for fit in equal}) > 1:
        raise AmbiguousNamesError(path, equal)
    return min(equal, key=lambda fit: len(fit.added))


def plain_fits(names: Mapping[str, tuple], wanted: Mapping[str, tuple]) -> list[Fit]:
    matches: Counter[tuple[str, str]] = Counter()
    shapes: Counter[tuple[str, str]] = Counter()

    def count(prefix: str, added: str, name: str, here: str) -> None:
        matches[prefix, added] += 1
        shapes[prefix, added] += tuple(names[name]) == tuple(wanted[here])

    short_ends: dict[str, list[str]] = {}  # what follows a wrapper of the model -> the wrappers
    for here in wanted:
        for added in prefixes(here)[1:3]:
            if not any(character.isdigit() for character in added):
                short_ends.setdefault(here[len(added) :], []).append(added)
    for name in names:
        for prefix in prefixes(name):
            rest = name[len(prefix) :]
            if rest in wanted:
                count(prefix, "", name, rest)
            for added in short_ends.get(rest, ()):
                count(prefix, added, name, added + rest)
    return [Fit(prefix, added, n, shapes[prefix, added]) for (prefix, added), n in matches.items()]


def renamed_fits(names: Mapping[str, tuple], wanted: Mapping[str, tuple], rename: Callable[[str], str]) -> list[Fit]:
    """With load_rename typed, which says what a name becomes after the prefix of the part is gone."""
    found = []
    for prefix in sorted({prefix for name in names for prefix in prefixes(name)[:4]}):
        part = {name[len(prefix) :]: shape for name, shape in names.items() if name.startswith(prefix)}
        here = {name: rename(name) for name in part}
        hits = [name for name in part if here[name] in wanted]
        if hits:
            same = sum(tuple(part[name]) == tuple(wanted[here[name]]) for name in hits)
            found.append(Fit(prefix, "", len(hits), same, sum(here[name] != name for name in hits)))
    return found


def common_prefix(names: Collection[str], candidates: Iterable[str]) -> str:
    """The one of the candidates, longest first, that all names begin with; '' if none."""
    for prefix in sorted(candidates, key=len, reverse=True):
        if names and all(name.startswith(prefix) for name in names):
            return prefix
    return ""
