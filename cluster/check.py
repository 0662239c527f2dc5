"""`forebay check ...`: a line a case as it comes, `N passed, N failed` at the end, status 1 where one failed."""

import sys
from pathlib import Path


class Tally:
    """Prints cases and counts them; what was not run counts as neither."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def line(self, passed: bool | None, name: str, detail: str) -> None:
        word = {True: "pass", False: "FAIL", None: "----"}[passed]
        self.passed += passed is True
        self.failed += passed is False
        print(f"{word}  {name:52} {detail}", flush=True)

    def close(self) -> int:
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed or not self.passed else 0


def check_golden(folder: Path, device: str) -> int:
    from forebay.workers import golden
    from forebay.workers.config_fields import FolderError

    tally = Tally()
    try:
        for case in golden.check_golden(folder, device):
            beside = "" if case.error is None else f"error {case.error:.2e}, tolerance {case.tolerance:.2e}  "
            tally.line(case.passed, case.name, beside + case.detail)
    except FolderError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 2
    return tally.close()


def check_resume(model: str, plant: str | None, tier: str | None, transfer: str, device: str) -> int:
    from forebay.kvstore.pool_address import PoolError
    from forebay.workers import resume_check
    from forebay.workers.config_fields import FolderError

    tally = Tally()

    def say(case: resume_check.Case) -> None:
        tally.line(case.passed, case.name, case.detail)

    try:
        # argparse admits the plants, the tiers and the transfers alone
        resume_check.check_resume(model, plant, say, tier=tier, transfer=transfer, device=device)  # type: ignore[arg-type]
    except (FolderError, ValueError, PoolError) as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 2
    return tally.close()
