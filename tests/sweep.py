"""Run the tests marked slow, one after the other in a fixed order, until the time is up; say what was not reached.

python tests/sweep.py --minutes 60
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time


def slow_tests() -> list[str]:
    """The ids of all tests marked slow, in the order in which pytest collects them."""
    command = [sys.executable, "-m", "pytest", "-m", "slow", "--collect-only", "-q"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode not in (0, 5):  # 5: no test is marked slow
        sys.exit(listed.stdout + listed.stderr)
    return [line.strip() for line in listed.stdout.splitlines() if "::" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="time for all of them")
    deadline = time.monotonic() + parser.parse_args().minutes * 60
    passed, failed, not_reached = [], [], []
    for test in slow_tests():
        left = deadline - time.monotonic()
        if left < 1:
            not_reached.append(test)
            continue
        try:
            command = [sys.executable, "-m", "pytest", "-q", "--no-header", test]
            status = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            not_reached.append(test)
            continue
        (passed if status == 0 else failed).append(test)
    for test in not_reached:
        print(f"not reached: {test}")
    for test in failed:
        print(f"FAILED {test}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(not_reached)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
