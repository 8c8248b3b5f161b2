"""Whether two runs have the same numbers: python same_numbers.py RUN_DIR RUN_DIR. Status 0 if so, 1 if not."""

import json
import sys
from pathlib import Path


def numbers(run_dir):
    """What training and validation logged, in full precision, without the time that it took."""
    lines = [json.loads(line) for line in (Path(run_dir) / "log.jsonl").read_text().splitlines()]
    return [{**line, "wall": None} for line in lines if line["event"] in ("train", "valid")]


one, other = map(numbers, sys.argv[1:3])
different = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
if one == other:
    print(f"all {len(one)} lines are equal, the last is {one[-1]}")
else:
    print(f"line {different} differs:", *(run[different : different + 1] for run in (one, other)), sep="\n  ")
sys.exit(one != other)
