"""Optimizer state by index, as torch writes it, to state by parameter name.

torch numbers parameters through its groups and writes no names. The order inside a group is the model's; how parameters
were dealt to groups is found by what programs do, and every answer is held against the shapes of the moments.
Must not know: files, the Trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from checkpoint_file import TensorRef

NORM_OR_BIAS = re.compile(
    r"(^|\.)bias$|layernorm|layer_norm|rmsnorm|(^|[._])norm\d*\b|_norm(\.|$)|(^|\.)ln_?\w*\.", re.IGNORECASE
)
NOT_TRAINED = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")


def parameters_in_order(model: Mapping[str, TensorRef], left_out: Collection[str]) -> list[str]:
    """The names of a saved model that can be parameters: without buffers, each shared tensor under its first name."""
    seen: set[tuple] = set()
    names = []
    for name, ref in model.items():
        place = (ref._record, ref._offset, tuple(ref.shape), ref._stride)
        if name in left_out or place in seen or NOT_TRAINED.search(name) or not ref.dtype.is_floating_point:
            continue
        if ref.nbytes:
            seen.add(place)
        names.append(name)
    return names


def names_by_index(
    optimizer: Mapping[str, Any], model: Mapping[str, TensorRef], candidates: Sequence[Sequence[str]]
) -> dict[int, str] | None:
    """Index in the file -> parameter name, None where nothing fits.

    candidates: lists of names that may be the model's parameters in its order, the likeliest first.
    """
    groups = [list(group["params"]) for group in optimizer["param_groups"]]
    for parameters in candidates:
        for dealt in ways_to_deal(parameters, model, [len(group) for group in groups]):
            found = {index: name for group, names in zip(groups, dealt) for index, name in zip(group, names)}
            if fits(found, optimizer["state"], model):
                return found
    for parameters in candidates:
        if len(groups) == 1 and (aligned := align(groups[0], parameters, optimizer["state"], model)):
            return aligned
    return None


def ways_to_deal(names: Sequence[str], model: Mapping[str, TensorRef], sizes: list[int]) -> Iterator[list[list[str]]]:
    """How programs deal parameters to groups: all in one, one after another, or apart by shape or name."""
    if sum(sizes) != len(names):
        return
    rules: list[Callable[[str], bool]] = [
        lambda name: len(model[name].shape) >= 2,
        lambda name: not NORM_OR_BIAS.search(name),
        lambda name: not name.endswith("bias"),
    ]
    if len(sizes) == 2:
        for rule in rules:
            first = [name for name in names if rule(name)]
            second = [name for name in names if not rule(name)]
            for dealt in ([first, second], [second, first]):
                if [len(part) for part in dealt] == sizes:
                    yield dealt
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    yield [list(names[begin : begin + size]) for begin, size in zip(begins, sizes)]


def shape_of_state(entry: Any) -> tuple | None:
    """The shape of a parameter by the moments kept for it."""
    if not isinstance(entry, Mapping):
        return None
    shapes = [tuple(value.shape) for key, value in entry.items() if isinstance(value, TensorRef) and key != "step"]
    return max(shapes, key=len) if shapes else None


def fits(found: Mapping[int, str], state: Mapping, model: Mapping[str, TensorRef]) -> bool:
    shapes = ((shape_of_state(state.get(index)), tuple(model[name].shape)) for index, name in found.items())
    return all(shape is None or shape == expected for shape, expected in shapes)


def align(
    indices: Sequence[int], names: Sequence[str], state: Mapping, model: Mapping[str, TensorRef]
) -> dict[int, str] | None:
    """Names for fewer indices than names (some were frozen), if the shapes leave one way only."""
    shapes = [shape_of_state(state.get(index)) for index in indices]
    if len(indices) > len(names) or None in shapes:
        return None
    first, last = [], []
    for order, found, wanted in ((range(len(names)), first, shapes), (reversed(range(len(names))), last, shapes[::-1])):
        left = list(wanted)
        for number in order:
            if left and tuple(model[names[number]].shape) == left[0]:
                found.append(number)
                left.pop(0)
        if left:
            return None
    return {i: names[n] for i, n in zip(indices, first)} if first == last[::-1] else None


def unflattened(
    optimizer: Mapping[str, Any], model: Mapping[str, TensorRef], names: Sequence[str]
) -> dict[str, Any] | None:
    """State that one vector holds for all parameters, cut into one entry for each; None where the sizes do not fit."""
    ((_, entry),) = optimizer["state"].items()
    vectors = {key: value for key, value in entry.items() if isinstance(value, TensorRef) and len(value.shape) == 1}
    total = sum(model[name].shape.numel() for name in names)
    if not vectors or any(vector.shape.numel() != total or vector._stride != (1,) for vector in vectors.values()):
        return None
    state, begin = {}, 0
    for index, name in enumerate(names):
        shape = tuple(model[name].shape)
        own = {key: value for key, value in entry.items() if key not in vectors}
        for key, vector in vectors.items():
            own[key] = TensorRef(
                vector.dtype, shape, vector._record, vector._offset + begin * vector.dtype.itemsize, rows(shape)
            )
        state[index], begin = own, begin + model[name].shape.numel()
    group = {**optimizer["param_groups"][0], "params": list(range(len(names)))}
    return {"state": state, "param_groups": [group]}


def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that lies row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
