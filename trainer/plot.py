"""`fairtrain-plot`: curves of runs, and the learning rate that a config stands for, as a PNG or in the terminal.

    fairtrain-plot outputs/digits outputs/digits_big --key loss --key gnorm -o curves.png
    fairtrain-plot --schedule lr_scheduler=cosine optimization.max_update=1000 -o lr.png

Owns: what is drawn and how. It reads log.jsonl through trainer.logs and asks trainer.lr_scheduler for the rates.
Status: 0 drawn, 2 bad input, said in one sentence. PNGs are drawn by Pillow, which the sample pictures need anyway.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Sequence

from trainer.errors import ConfigError
from trainer.logs import LOG_FILE, read_log
from trainer.printed import as_long_as_it_is_read

_MAX_POINTS = 2000  # of a curve: more are not to be told apart on a picture
# Told apart by colour-blind eyes too (Okabe and Ito's palette).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass
class Curve:
    """Points (x, y) in order of x. A y that is not finite is a gap."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Panel:
    """Curves that share their axes."""

    title: str
    x_title: str
    curves: list[Curve]
    log_scale: bool = False


@as_long_as_it_is_read
def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        panels = [schedule_panel(arguments)] if arguments.schedule else run_panels(arguments)
        if arguments.output:
            write_png(panels, Path(arguments.output).expanduser())
            print(arguments.output)
        else:
            print("\n\n".join(text_plot(panel, *_terminal_size()) for panel in panels), flush=True)
    except ConfigError as error:
        print(f"fairtrain-plot: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fairtrain-plot", description="Curves of runs, or the schedule of a config.")
    parser.add_argument("what", nargs="+", metavar="RUN_DIR|OVERRIDE", help="folders of runs; overrides for --schedule")
    parser.add_argument("-o", "--output", metavar="PNG", help="picture to write; without it the plot is text")
    parser.add_argument("--key", action="append", metavar="NAME", help="metric to plot, repeatable (default: loss)")
    parser.add_argument("--event", choices=["train", "valid"], help="curves of training or of validation alone")
    parser.add_argument("--x", default="num_updates", metavar="NAME", help="num_updates (default), epoch or wall")
    parser.add_argument("--log", action="store_true", help="logarithmic scale; values of 0 and below are left out")
    parser.add_argument("--schedule", action="store_true", help="plot the learning rate that the overrides stand for")
    parser.add_argument("--config-dir", metavar="DIR", help="another folder of configs, as for fairtrain")
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Curves of runs


def run_panels(arguments: argparse.Namespace) -> list[Panel]:
    """A panel for each key, in it a curve for each run and each of its training and validation subsets."""
    logs = {name: _read_run(name) for name in arguments.what}
    labels = _short_names(list(logs))
    panels = []
    for key in arguments.key or ["loss"]:
        curves = []
        for name, records in logs.items():
            curves += run_curves(records, key, arguments.x, arguments.event, labels[name] if len(logs) > 1 else "")
        if not curves:
            names = sorted({name for records in logs.values() for record in records for name in _metrics(record)})
            raise ConfigError(f"no run has {key!r} over {arguments.x!r}; there are: {', '.join(names) or 'no numbers'}")
        panels.append(Panel(key, arguments.x, curves, arguments.log))
    return panels


def _read_run(name: str) -> list[dict[str, Any]]:
    path = Path(name).expanduser()
    path = path / LOG_FILE if path.is_dir() else path
    try:
        return list(read_log(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (a run's folder, or its {LOG_FILE}, is wanted)") from error


def _short_names(names: list[str]) -> dict[str, str]:
    """The ends of the paths, as long as they must be to differ."""
    parts = {name: Path(name).expanduser().resolve().parts for name in names}
    for length in range(1, max(map(len, parts.values())) + 1):
        short = {name: "/".join(parts[name][-length:]) for name in names}
        if len(set(short.values())) == len(set(parts.values())):
            return short
    return {name: name for name in names}


def _metrics(record: dict[str, Any]) -> list[str]:
    if record.get("event") not in ("train", "valid"):
        return []
    return [name for name in record if name not in ("event", "subset") and _number(record[name]) is not None]


def _number(value: Any) -> float | None:
    """A number of log.jsonl, where "nan" and "inf" are text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def run_curves(records: list[dict], key: str, x: str, event: str | None, label: str) -> list[Curve]:
    """The curves of one run: that of training, then one for each validation subset."""
    curves: dict[str, Curve] = {}
    for record in records:
        kind = record.get("event")
        if kind not in ("train", "valid") or event not in (None, kind):
            continue
        point = _number(record.get(x)), _number(record.get(key))
        if None not in point:
            name = " ".join(filter(None, (label, "train" if kind == "train" else str(record.get("subset", kind)))))
            curves.setdefault(name, Curve(name)).points.append(point)
    for curve in curves.values():
        curve.points.sort(key=lambda point: point[0])
    return list(curves.values())


# ---------------------------------------------------------------------------------------------------------------------
# The schedule of a config


def schedule_panel(arguments: argparse.Namespace) -> Panel:
    """The learning rate of each update, counted from 1, as the config that the overrides compose has it."""
    cfg = _compose(arguments.what, arguments.config_dir)
    max_update = cfg.optimization.max_update or cfg.lr_scheduler.get("total_num_update") or 0
    if max_update <= 0:
        raise ConfigError("a schedule is plotted up to optimization.max_update, which is 0: type a number of updates")
    name = str(cfg.lr_scheduler.get("_target_", "")).rsplit(".", 1)[-1]
    return Panel("lr", "num_updates", [Curve(name, schedule_points(cfg, max_update))], arguments.log)


def _compose(overrides: Sequence[str], config_dir: str | None) -> Any:
    from trainer import compose as composing
    from trainer.config import complete_config

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a scheduler of the current folder, as fairtrain finds it
    flags = [*overrides, *(["--config-dir", config_dir] if config_dir else [])]
    return complete_config(composing.compose(composing.parse_flags(flags)).cfg)


def schedule_points(cfg: Any, max_update: int) -> list[tuple[float, float]]:
    """(update, rate it uses): update u uses the schedule's value after u - 1 updates."""
    import torch

    from trainer.lr_scheduler import build_lr_scheduler

    lr = cfg.optimization.lr
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = build_lr_scheduler(cfg.lr_scheduler, optimizer, lr, cfg.optimization.max_update)
    step = max(1, max_update // _MAX_POINTS)
    shown = [*range(1, max_update, step), max_update]
    return [(float(update), scheduler.step_update(update - 1)) for update in shown]


# ---------------------------------------------------------------------------------------------------------------------
# Axes


@dataclass
class Axes:
    """The range of a panel, and where in it a point stands."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log_scale: bool

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Both in 0 … 1, from the lower left corner."""
        low, high = self._scaled(self.y_low), self._scaled(self.y_high)
        return (x - self.x_low) / (self.x_high - self.x_low), (self._scaled(y) - low) / (high - low)

    def _scaled(self, y: float) -> float:
        return math.log10(y) if self.log_scale else y

    def y_ticks(self) -> list[float]:
        if not self.log_scale:
            return round_ticks(self.y_low, self.y_high)
        first, last = math.ceil(math.log10(self.y_low) - 1e-9), math.floor(math.log10(self.y_high) + 1e-9)
        decades = [10.0**exponent for exponent in range(first, last + 1)]
        return decades[:: max(1, len(decades) // 6)] if len(decades) > 1 else [self.y_low, self.y_high]


def axes_of(panel: Panel) -> Axes:
    """Axes that hold all points that can be shown. Raises ConfigError if there are none."""
    points = [point for curve in panel.curves for run in unbroken(curve.points, panel.log_scale) for point in run]
    if not points:
        scale = " on a logarithmic scale" if panel.log_scale else ""
        raise ConfigError(f"{panel.title} has no value that can be shown{scale}")
    xs, ys = zip(*points)
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    if panel.log_scale:
        return Axes(x_low, x_high, y_low / 1.1, y_high * 1.1, True)
    margin = 0.05 * (y_high - y_low) or 0.05 * abs(y_high) or 0.5
    return Axes(x_low, x_high, y_low - margin, y_high + margin, False)


def unbroken(points: list[tuple[float, float]], log_scale: bool) -> Iterator[list[tuple[float, float]]]:
    """The stretches of a curve between its gaps."""
    stretch: list[tuple[float, float]] = []
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log_scale):
            stretch.append((x, y))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def thinned(points: list[tuple[float, float]], limit: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points, which keep the lowest and the highest value of each piece: no peak is lost."""
    if len(points) <= limit:
        return points
    size = math.ceil(len(points) / (limit // 2))
    kept = []
    for begin in range(0, len(points), size):
        piece = points[begin : begin + size]
        kept += sorted({min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])})
    return kept


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About so many round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and abs(value) < 1e7 else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------------------------
# As a picture


def write_png(panels: list[Panel], path: Path, width: int = 900, height: int = 420) -> None:
    """The panels, one below the other. Raises ConfigError where Pillow is missing or the file cannot be written."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ConfigError("pictures need Pillow: pip install 'fairtrain[images]', or leave out -o for text") from error
    scale = 2  # drawn twice as large and shrunk: Pillow's lines are jagged
    image = Image.new("RGB", (width * scale, height * scale * len(panels)), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(14 * scale)
    names = dict.fromkeys(curve.name for panel in panels for curve in panel.curves)
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    for number, panel in enumerate(panels):
        _Picture(draw, font, colours, scale, number * height, width, height).draw_panel(panel)
    image = image.resize((width, height * len(panels)), Image.Resampling.LANCZOS)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        image.save(aside, format="PNG")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror or error})") from error


class _Picture:
    """One panel within a drawing."""

    def __init__(
        self, draw: Any, font: Any, colours: dict[str, str], scale: int, top: int, width: int, height: int
    ) -> None:
        self._draw, self._font, self._colours, self._scale = draw, font, colours, scale
        self._left, self._right = 90 * scale, (width - 20) * scale
        self._top, self._bottom = (top + 40) * scale, (top + height - 50) * scale

    def draw_panel(self, panel: Panel) -> None:
        axes = axes_of(panel)
        self._draw_grid(panel, axes)
        for curve in panel.curves:
            self._draw_curve(curve, axes, self._colours[curve.name])
        self._draw_legend(panel)

    def _pixel(self, axes: Axes, x: float, y: float) -> tuple[float, float]:
        right, up = axes.place(x, y)
        return self._left + right * (self._right - self._left), self._bottom - up * (self._bottom - self._top)

    def _draw_grid(self, panel: Panel, axes: Axes) -> None:
        gap, line = 8 * self._scale, self._scale
        for tick in axes.y_ticks():
            _, y = self._pixel(axes, axes.x_low, tick)
            self._draw.line([(self._left, y), (self._right, y)], fill="#e0e0e0", width=line)
            self._draw.text((self._left - gap, y), tick_text(tick), fill="#404040", font=self._font, anchor="rm")
        for tick in round_ticks(axes.x_low, axes.x_high):
            x, _ = self._pixel(axes, tick, axes.y_high)
            self._draw.line([(x, self._top), (x, self._bottom)], fill="#e0e0e0", width=line)
            self._draw.text((x, self._bottom + gap), tick_text(tick), fill="#404040", font=self._font, anchor="ma")
        self._draw.rectangle([self._left, self._top, self._right, self._bottom], outline="#808080", width=line)
        middle = (self._left + self._right) / 2
        self._draw.text((middle, self._bottom + 3.5 * gap), panel.x_title, fill="black", font=self._font, anchor="ma")
        self._draw.text((self._left, self._top - gap), panel.title, fill="black", font=self._font, anchor="ls")

    def _draw_curve(self, curve: Curve, axes: Axes, colour: str) -> None:
        dot = 3 * self._scale
        for stretch in unbroken(curve.points, axes.log_scale):
            pixels = [self._pixel(axes, x, y) for x, y in thinned(stretch)]
            if len(pixels) > 1:
                self._draw.line(pixels, fill=colour, width=2 * self._scale, joint="curve")
            if len(pixels) <= 30:  # few points, as of validations, are to be seen as such
                for x, y in pixels:
                    self._draw.ellipse([x - dot, y - dot, x + dot, y + dot], fill=colour)

    def _draw_legend(self, panel: Panel) -> None:
        """From the right end of the title's row to the left."""
        x, y, gap = self._right, self._top - 8 * self._scale, 8 * self._scale
        for curve in reversed(panel.curves):
            x -= self._font.getlength(curve.name)
            self._draw.text((x, y), curve.name, fill="black", font=self._font, anchor="ls")
            x -= 4 * gap
            level = y - 5 * self._scale
            colour = self._colours[curve.name]
            self._draw.line([(x, level), (x + 3 * gap, level)], fill=colour, width=3 * self._scale)
            x -= 2 * gap


# ---------------------------------------------------------------------------------------------------------------------
# As text


def _terminal_size() -> tuple[int, int]:
    import shutil

    size = shutil.get_terminal_size((80, 24))
    return max(40, size.columns), max(10, min(size.lines - 4, 24))


def text_plot(panel: Panel, width: int = 80, height: int = 20) -> str:
    """The panel in characters: one curve in braille, 2 × 4 dots a character; several with a sign for each."""
    axes = axes_of(panel)
    margin = 10
    columns = width - margin - 2
    rows = [[" "] * columns for _ in range(height)]
    for number, curve in enumerate(panel.curves):
        _dot_curve(rows, curve, axes, None if len(panel.curves) == 1 else "*+ox#@%"[number % 7])
    ticks = {0: axes.y_high, height // 2: None, height - 1: axes.y_low}
    if not axes.log_scale:
        ticks[height // 2] = axes.y_high + (axes.y_low - axes.y_high) * (height // 2) / (height - 1)
    lines = [_title_line(panel)]
    for number, row in enumerate(rows):
        tick = ticks.get(number)
        lines.append(f"{'' if tick is None else tick_text(tick):>{margin}} │{''.join(row)}".rstrip())
    low, high = tick_text(axes.x_low), tick_text(axes.x_high)
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(" " * (margin + 2) + low + panel.x_title.center(columns - len(low) - len(high)) + high)
    return "\n".join(lines)


def _title_line(panel: Panel) -> str:
    if len(panel.curves) == 1:
        return f"{panel.title}  {panel.curves[0].name}"
    signs = [f"{'*+ox#@%'[number % 7]} {curve.name}" for number, curve in enumerate(panel.curves)]
    return f"{panel.title}  {'  '.join(signs)}"


def _dot_curve(rows: list[list[str]], curve: Curve, axes: Axes, sign: str | None) -> None:
    """Put a curve into the rows: braille dots, or `sign` in each cell that it passes."""
    dots_x, dots_y = 2 * len(rows[0]), 4 * len(rows)
    for stretch in unbroken(curve.points, axes.log_scale):
        places = [axes.place(x, y) for x, y in thinned(stretch)]
        pixels = [(round(x * (dots_x - 1)), round((1 - y) * (dots_y - 1))) for x, y in places]
        for begin, end in zip(pixels, pixels[1:] or pixels):
            for x, y in _between(begin, end):
                row, cell = rows[y // 4], x // 2
                if sign is not None:
                    row[cell] = sign
                else:
                    bits = ord(row[cell]) - 0x2800 if row[cell] != " " else 0
                    row[cell] = chr(0x2800 + (bits | _BRAILLE[y % 4][x % 2]))


_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode's bit of the dot in [row][column]


def _between(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
    return [
        (round(begin[0] + (end[0] - begin[0]) * i / steps), round(begin[1] + (end[1] - begin[1]) * i / steps))
        for i in range(steps + 1)
    ]


if __name__ == "__main__":
    sys.exit(main())
