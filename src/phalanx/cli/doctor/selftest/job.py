"""Runs the ranks of the self-test under `phalanx run`, and turns what they say into findings."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.launching.environment import OWN_VARIABLES

from ..findings import Finding, Severity, problem

__all__ = ["self_test"]

LIMIT = 120.0
"""Seconds for one job: far more than it takes, so that a machine that hangs does not hang the doctor."""
GRACE = 15.0
_ADVICE = (
    "'phalanx doctor' says what is wrong with this machine; with --master HOST:PORT also with the way to another. "
    "PHALANX_LOG=debug tells more."
)


def self_test(
    where: Sequence[str], base: Mapping[str, str], *, progress: Callable[[str], None], tell: Callable[[str], None]
) -> Iterator[Finding]:
    """Runs the job as it is, then over TCP only, and gives each finding as soon as it is there.

    Args:
        where: Options of `phalanx run`: how many ranks, on which hosts.
        base: The environment.
        progress: Hears what is being done.
        tell: Takes what the job wrote if it failed.
    """
    # As a rank of a job the doctor has variables that are not for the ranks of its own.
    clean = {name: value for name, value in base.items() if name not in OWN_VARIABLES}
    jobs = [("as a job would run", {}), ("over TCP only", {"PHALANX_TRANSPORT": "tcp"})]
    if clean.get("PHALANX_TRANSPORT") == "tcp":
        jobs = jobs[1:]
    for number, (how, variables) in enumerate(jobs):
        progress(f"starting ranks, {how} …")
        failed = False
        for finding in _run(where, {**clean, **variables}, how, tell):
            failed = failed or finding.status is Severity.PROBLEM
            if number == 0 or finding.topic != "world":  # once is enough
                yield finding
            progress(f"{finding.topic}: done; {how} …")
        if failed:
            return


def _run(where: Sequence[str], environment: dict[str, str], how: str, tell: Callable[[str], None]) -> Iterator[Finding]:
    ranks = [*where, "--no-prefix", "-m", "phalanx.cli.doctor.selftest.ranks"]
    job = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "run", *ranks],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert job.stdout is not None
    assert job.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=errors.extend, args=(job.stderr,), daemon=True)
    reader.start()
    late = threading.Event()

    def give_up() -> None:
        late.set()
        job.terminate()

    timer = threading.Timer(LIMIT, give_up)
    timer.start()
    try:
        for line in job.stdout:
            finding = _read(line)
            if finding is not None:
                yield finding
        code = job.wait()
    finally:
        timer.cancel()
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(GRACE)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        reader.join(GRACE)
        job.stdout.close()
        job.stderr.close()
    if code:
        text = "".join(errors).strip()
        tell(text)
        why = f"it did not end within {LIMIT:g} s" if late.is_set() else _last_error(text) or f"exit code {code}"
        yield problem(f"self-test, {how}", f"the job failed: {why}", _ADVICE)


def _read(line: str) -> Finding | None:
    try:
        row = json.loads(line)
        return Finding(row["topic"], Severity(row["status"]), row["found"], row["advice"])
    except (ValueError, KeyError, TypeError):
        return None  # a word of something that the ranks import


def _last_error(text: str) -> str:
    """The line of a report that says most: that of the exception, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("phalanx.errors.")]
    own = [line.removeprefix("phalanx: ") for line in lines if not line.endswith("ended because of it")]
    return (named or own or [""])[-1]
