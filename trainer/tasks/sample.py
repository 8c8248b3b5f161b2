"""`fairtrain-sample FILE [-o PNG|TXT]`: draw from the model in a checkpoint. Text goes to stdout without -o.

Owns: the command line, and the way from a checkpoint to its model. What is drawn is the tasks' business.
The words of a file are data: which class is built is looked up in a table here, never imported by the file's name.

    fairtrain-sample checkpoint_best.pt -o digits.png --class 0-9 -n 8 --cfg-scale 2
    fairtrain-sample checkpoint_last.pt -o text.txt --prompt "def main("
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import checkpoint_file
import checkpoint_utils
from trainer.errors import ConfigError
from trainer.printed import as_long_as_it_is_read
from trainer.randomness import seed_all

DIT_TARGET = "trainer.tasks.dit.model.DiT"
LANGUAGE_MODEL_TARGET = "trainer.tasks.language_modeling.model.TransformerLM"


@as_long_as_it_is_read
def main(argv: Sequence[str] | None = None) -> int:
    """Status: 0 done, 2 bad input, 1 anything else."""
    arguments = parser().parse_args(argv)
    try:
        print(sample_to_file(arguments))
    except (ConfigError, checkpoint_file.CheckpointError) as error:
        print(f"fairtrain-sample: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"fairtrain-sample: {error.filename or arguments.output}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="fairtrain-sample", description="Draw samples from the model in a checkpoint."
    )
    command.add_argument("file", metavar="FILE", help="a checkpoint that fairtrain wrote")
    command.add_argument(
        "-o",
        "--output",
        default=None,
        metavar="PNG|TXT",
        help="what is written; images also go to .npy or .pt as numbers; without it (or with '-') text is printed",
    )
    command.add_argument("--seed", type=int, default=0, help="the same seed draws the same samples (default 0)")
    command.add_argument("--no-ema", action="store_true", help="the trained weights, not their average")
    command.add_argument(
        "--device", default=None, help="such as cpu or cuda:0 (default: an accelerator where there is one)"
    )
    images = command.add_argument_group("diffusion transformers")
    images.add_argument(
        "--class",
        dest="classes",
        default=None,
        metavar="LIST",
        help="numbers and ranges such as 3 or 0-9,42 (default: the first ten classes)",
    )
    images.add_argument(
        "-n", type=int, default=8, metavar="N", help="images of each class, a row of the picture (default 8)"
    )
    images.add_argument("--cfg-scale", type=float, default=4.0, help="classifier-free guidance, 1: none (default 4)")
    images.add_argument(
        "--cfg-channels",
        default="3",
        metavar="N|all",
        help="leading channels that are guided (default 3, as in the official samples)",
    )
    images.add_argument(
        "--steps", type=int, default=None, help="sampling steps (default 250, or all if there are fewer)"
    )
    images.add_argument("--ddim", action="store_true", help="DDIM in place of ancestral sampling")
    images.add_argument("--eta", type=float, default=0.0, help="fresh noise in DDIM, from 0 (none, default) to 1")
    images.add_argument(
        "--clip",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep the believed image in [-1, 1] at each step (default: for pixels, not for latents)",
    )
    text = command.add_argument_group("language models")
    text.add_argument("--prompt", default="", help="what the text begins with")
    text.add_argument("--length", type=int, default=512, metavar="BYTES", help="bytes that are added (default 512)")
    text.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default 0.8)")
    text.add_argument("--top-k", type=int, default=0, help="draw from the likeliest K only, 0: from all (default)")
    return command


def sample_to_file(arguments: argparse.Namespace) -> str:
    """Draw and write. Returns the line to tell. Raises ConfigError, CheckpointError, OSError."""
    state = checkpoint_utils.load_checkpoint_to_cpu(os.path.expanduser(arguments.file))
    try:
        target = state["cfg"]["model"]["_target_"]
    except (KeyError, TypeError):
        raise ConfigError(
            f"{arguments.file} does not name a model that can be sampled from: it takes a checkpoint of task=dit, "
            "task=digits or task=language_modeling"
        ) from None
    device = choose_device(arguments.device)
    if target == DIT_TARGET:
        return _sample_images(arguments, state, device)
    if target == LANGUAGE_MODEL_TARGET:
        return _sample_text(arguments, state, device)
    raise ConfigError(
        f"{arguments.file} holds a {target}; samples are drawn from {DIT_TARGET} and {LANGUAGE_MODEL_TARGET}"
    )


def choose_device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {error}") from error


def build_model(model_class: type[nn.Module], state: Mapping[str, Any], use_ema: bool) -> tuple[nn.Module, str]:
    """The checkpoint's model in evaluation mode, and a word on which weights it has.

    `model_class`: known to the caller; only its arguments come from the file.
    """
    arguments = {name: value for name, value in state["cfg"]["model"].items() if name != "_target_"}
    check_sizes(arguments, state["model"])
    try:
        model = model_class(**arguments)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the checkpoint's cfg.model does not fit {model_class.__name__} ({reason})") from error
    average = (state.get("extra_state") or {}).get("ema") if use_ema else None
    weights = {**state["model"], **(average or {})}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"the checkpoint's weights do not fit its cfg.model: {error}") from error
    return model.eval(), "averaged weights" if average else "trained weights"


def check_sizes(arguments: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number in cfg.model that is far beyond the weights: the file must not fill the memory."""
    numel = sum(weight.numel() for weight in weights.values() if isinstance(weight, Tensor))
    for name, value in arguments.items():
        if isinstance(value, (int, float)) and abs(value) > 1_000_000 + numel or name == "depth" and value > len(weights):
            raise ConfigError(f"the checkpoint's cfg.model.{name} is {value!r:.40}, which its weights do not fit")


# ---- images ----


def _sample_images(arguments: argparse.Namespace, state: Mapping[str, Any], device: torch.device) -> str:
    from trainer.tasks.dit.model import DiT

    _check_suffix(arguments.output, (".png", ".npy", ".pt"))
    model, weights = build_model(DiT, state, not arguments.no_ema)
    classes = parse_classes(arguments.classes, model.num_classes)
    images = draw_images(model.to(device), classes, arguments, state["cfg"].get("criterion") or {})
    _write_images(images, arguments.output, arguments.n)
    if model.in_channels > 3 and arguments.output.lower().endswith(".png"):
        print(
            "these are latents: the picture shows three of their channels. For a decoder, write -o FILE.npy",
            file=sys.stderr,
        )
    return f"{arguments.output}: {len(images)} images of {len(classes)} classes ({weights})"


def draw_images(model: nn.Module, classes: list[int], arguments: argparse.Namespace, criterion: Mapping) -> Tensor:
    """Samples [classes * n, C, S, S] on the CPU, class after class. `criterion`: the checkpoint's cfg.criterion."""
    from trainer.tasks.dit.diffusion import build_diffusion, sample_classes

    if arguments.n < 1:
        raise ConfigError(f"-n {arguments.n}: at least one image of each class")
    device = next(model.parameters()).device
    cfg_channels, all_steps = _cfg_channels(arguments.cfg_channels), criterion.get("diffusion_steps", 1000)
    steps = min(250, all_steps) if arguments.steps is None else arguments.steps
    schedule = criterion.get("noise_schedule", "linear")
    diffusion = build_diffusion(all_steps, schedule, steps, arguments.ddim).to(device)
    labels = torch.tensor(classes).repeat_interleave(arguments.n).to(device)
    clip = model.in_channels in (1, 3) if arguments.clip is None else arguments.clip
    seed_all(arguments.seed)  # as it is, not derived: official seeds then give official images
    images = sample_classes(
        model,
        diffusion,
        labels,
        arguments.cfg_scale,
        clip,
        arguments.eta if arguments.ddim else None,
        cfg_channels,
    )
    return images.cpu()


def parse_classes(text: str | None, num_classes: int) -> list[int]:
    """'3', '0-9,42' to class numbers; None to the first ten (or all, if fewer)."""
    if text is None:
        return list(range(min(10, num_classes)))
    classes = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--class {text}: expected numbers and ranges such as 3 or 0-9,42")
        classes += range(int(first), int(last if dash else first) + 1)
    wrong = [c for c in classes if c >= num_classes]
    if wrong or not classes:
        raise ConfigError(f"--class {text}: this model has the classes 0 to {num_classes - 1}")
    return classes


def _cfg_channels(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--cfg-channels {text}: a number from 1 on, or all")
    return int(text)


def _write_images(images: Tensor, path: str, columns: int) -> None:
    from trainer.tasks.dit.pictures import write_grid

    if path.lower().endswith(".png"):
        write_grid(images, path, columns)
    elif path.lower().endswith(".npy"):
        import numpy as np

        np.save(path, images.numpy())
    else:
        torch.save(images, path)


# ---- text ----


def _sample_text(arguments: argparse.Namespace, state: Mapping[str, Any], device: torch.device) -> str:
    from trainer.tasks.language_modeling.model import TransformerLM
    from trainer.tasks.language_modeling.task import sample_text

    if arguments.output is not None and arguments.output.lower().endswith((".png", ".npy", ".pt")):
        raise ConfigError(f"-o {arguments.output}: this is a language model, its samples are text")
    model, weights = build_model(TransformerLM, state, not arguments.no_ema)
    text = sample_text(
        model.to(device),
        arguments.prompt.encode(),
        arguments.length,
        arguments.temperature,
        arguments.top_k,
        arguments.seed,
    ).decode(errors="replace")
    if arguments.output in (None, "-"):
        return text
    with open(arguments.output, "w", encoding="utf-8") as file:
        file.write(text)
    return f"{arguments.output}: {arguments.length} bytes after the prompt ({weights})"


def _check_suffix(path: str | None, allowed: tuple[str, ...]) -> None:
    """Said before anything is drawn."""
    if path is None:
        raise ConfigError("this model draws images: say where they go, such as -o samples.png")
    if not path.lower().endswith(allowed):
        raise ConfigError(f"-o {path}: this model draws images, which are written as {', '.join(allowed)}")


if __name__ == "__main__":
    sys.exit(main())
