"""Kill tiny runs that save after each update, start them again until they are done, and compare with runs nobody killed.

    python benchmarks/kill_fuzz.py --kills 1000
    python benchmarks/kill_fuzz.py --kills 100 --only "zero, folder"

A kill is SIGKILL to all ranks: at a random moment, or at a random call that changes something in the run's folder.
Printed: which phase the kills hit (a call that was hit comes behind the colon), then what they did: differences from the
untouched run (bits of every checkpoint, lines of log.jsonl, names), starts that went back behind an announced save, fresh
starts where there was one, files that a start left lying about. The status is 1 if there is any. Needs Linux.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that was not installed

from tests.resume.killing import (  # noqa: E402
    LAYOUTS,
    Arrangement,
    Session,
    campaign,
    differences,
    random_kills,
    summary,
)

MAX_UPDATE = 40
FORMS = ((False, False), (True, False), (False, True), (True, True))  # folder, asynchronous


class Findings:
    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()
        self.sessions: list[Session] = []
        self.differences: list[str] = []

    @property
    def kills(self) -> int:
        return self.phases.total()

    @property
    def counts(self) -> dict[str, int]:
        return {
            "differences": len(self.differences),
            "starts that went back": sum(session.went_back for session in self.sessions),
            "fresh starts": sum(session.went_back and session.started_at == 0 for session in self.sessions),
            "stray files": sum(len(session.strays) for session in self.sessions),
        }

    def add(self, sessions: list[Session], found: list[str]) -> None:
        self.phases += summary(sessions)
        self.sessions += sessions
        self.differences += found


def fuzz(arrangement: Arrangement, num_kills: int, seed: int, folder: Path) -> Findings:
    """Runs of one arrangement, one after the other, until there were so many kills."""
    whole, findings = folder / "untouched", Findings()
    num_calls = campaign(whole, arrangement, [], MAX_UPDATE)[0].num_calls
    for number in range(num_kills + 1):
        if findings.kills >= num_kills:
            break
        kills = random_kills(num_kills - findings.kills, 1000 * seed + number, num_calls, session_s=1.5)
        run_dir = folder / str(number)
        sessions = campaign(run_dir, arrangement, kills, MAX_UPDATE)
        findings.add(sessions, differences(whole, run_dir))
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="of all arrangements together")
    parser.add_argument("--only", default="", help='arrangements whose name has this, such as "zero, folder"')
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    every = [Arrangement(layout, *form) for layout in LAYOUTS for form in FORMS]
    chosen = [arrangement for arrangement in every if args.only in str(arrangement)]
    if not chosen:
        parser.error(f"no arrangement has {args.only!r} in its name: {'; '.join(map(str, every))}")
    phases: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    print(f"seed {args.seed}")
    for arrangement in chosen:
        with tempfile.TemporaryDirectory(prefix="kill_fuzz_") as folder:
            findings = fuzz(arrangement, -(-args.kills // len(chosen)), args.seed, Path(folder))
        phases += findings.phases
        totals.update(findings.counts)
        counts = ", ".join(f"{count} {what}" for what, count in findings.counts.items())
        print(f"{str(arrangement):40} {findings.kills:5} kills: {counts}", flush=True)
        for difference in findings.differences:
            print(f"    {difference}")
    print()
    for phase, count in phases.most_common():
        print(f"{count:6}  {phase}")
    print(f"{phases.total():6}  kills: {', '.join(f'{count} {what}' for what, count in totals.items())}")
    return 1 if totals.total() else 0


if __name__ == "__main__":
    sys.exit(main())
