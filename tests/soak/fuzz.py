"""A million inputs for every parser that reads what came from a network: `python -m tests.soak.fuzz`.

Each input must be accepted or refused with a documented error, quickly, and without memory beyond a bound. Inputs are
random bytes, mutations of valid messages, messages from a grammar, what Hypothesis thinks of, and, where atheris is
installed, what coverage leads it to. A failure is made small and printed, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.soak.fuzz_grammar import EDGES
from tests.soak.fuzz_targets import TARGETS, Target, warm_up

MAX_SECONDS = 2.0
"""For one input. Parsers need microseconds; a machine under load may stall for a while."""
MAX_ALLOCATED = 4 << 20
"""Bytes at once while any input is read. The largest payload that a fuzzed head may ask for is 64 KiB."""
MAX_RESIDENT = 32 << 20
"""Bytes by which the process may grow in all, whoever allocated them; what measures them needs a few, too."""
WEIGHTS = {"codec": 40, "control": 14, "handshake stranger": 6, "handshake changed": 8, "frame header": 5}
"""Shares of the inputs, in percent or so; every other parser gets 3."""
BATCH = 200
STUCK = 60.0


@dataclass
class Failure:
    """An input that a parser did not survive."""

    target: str
    data: bytes
    what: str


@dataclass
class Tally:
    """What became of the inputs."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in TARGETS})
    engines: Counter[str] = field(default_factory=Counter)
    slowest: Counter[str] = field(default_factory=Counter)
    """Microseconds."""
    allocated: Counter[str] = field(default_factory=Counter)
    """Peak of bytes."""
    failures: list[Failure] = field(default_factory=list)
    resident: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(self.engines.values())

    def feed(self, target: Target, data: bytes, engine: str) -> None:
        """Gives one input to a parser.

        Raises:
            Exception: The parser did not accept it and did not refuse it properly.
        """
        self.engines[engine] += 1
        began = time.perf_counter()
        try:
            target.parse(data)
            outcome = "accepted"
        except target.errors as error:
            outcome = type(error).__name__
        taken = time.perf_counter() - began
        self.outcomes[target.name][outcome] += 1
        self.slowest[target.name] = max(self.slowest[target.name], int(taken * 1e6))
        if taken > MAX_SECONDS:
            raise TimeoutError(f"one input of {len(data)} bytes took {taken:.1f} s")

    def fail(self, target: Target, data: bytes, error: BaseException) -> None:
        small = shrink(target, data, type(error))
        self.failures.append(Failure(target.name, small, f"{type(error).__name__}: {error}"))


def mutate(rng: random.Random, data: bytes, others: list[bytes], magic: list[bytes]) -> bytes:
    """A few random edits of a valid message."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 2, 4, 8, rng.randint(1, 32)))
        edit = rng.randrange(9)
        if edit == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif edit == 1 and at < len(out):
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif edit == 2:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(EDGES) & ((1 << 8 * width) - 1)
            out[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        elif edit == 3:
            out[at:at] = rng.randbytes(size)
        elif edit == 4:
            del out[at : at + size]
        elif edit == 5:
            del out[at:]
        elif edit == 6:
            out[at:at] = out[at : at + size] * rng.choice((1, 2, 50))
        elif edit == 7 and magic:
            out[at : at + rng.choice((0, size))] = rng.choice(magic)
        else:
            other = rng.choice(others)
            out[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(out)


def shrink(target: Target, data: bytes, kind: type[BaseException]) -> bytes:
    """The shortest input near this one that fails in the same way."""

    def fails(candidate: bytes) -> bool:
        try:
            target.parse(candidate)
        except target.errors:
            return False
        except kind:
            return True
        except Exception:
            return False
        return False

    size = len(data)
    while size:
        at = 0
        while at < len(data):
            shorter, zeroed = (
                data[:at] + data[at + size :],
                data[:at] + bytes(len(data[at : at + size])) + data[at + size :],
            )
            if fails(shorter):
                data = shorter
                continue
            if zeroed != data and fails(zeroed):
                data = zeroed
            at += size
        size //= 2
    return data


def fuzz_mutations(tally: Tally, inputs: int, rng: random.Random, until: float, advance: Callable[[int], None]) -> None:
    """Random bytes, mutated messages and messages from a grammar, in batches whose memory is measured."""
    tracemalloc.start()
    names = list(TARGETS)
    weights = [WEIGHTS.get(name, 3) for name in names]
    stop = tally.inputs + inputs
    while tally.inputs < stop and time.monotonic() < until and len(tally.failures) < 10:
        target = TARGETS[rng.choices(names, weights)[0]]
        batch: list[tuple[str, bytes]] = []
        for _ in range(min(BATCH, stop - tally.inputs)):
            choice = rng.random()
            if choice < 0.1:
                batch.append(("random", rng.randbytes(rng.choice((0, 1, 6, 8, 14, 24, rng.randint(0, 300))))))
            elif choice < 0.5 and target.generate is not None:
                message = target.generate(rng)
                nearly = mutate(rng, message, target.seeds, target.magic) if rng.random() < 0.5 else message
                batch.append(("grammar", nearly))
            else:
                batch.append(("mutation", mutate(rng, rng.choice(target.seeds), target.seeds, target.magic)))
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        data = b""
        try:
            for engine, data in batch:
                tally.feed(target, data, engine)
            peak = tracemalloc.get_traced_memory()[1] - before
            tally.allocated[target.name] = max(tally.allocated[target.name], peak)
            if peak > MAX_ALLOCATED:
                raise MemoryError(
                    f"{peak} bytes were allocated at once (at most {MAX_ALLOCATED}) in a batch of {BATCH}"
                )
        except Exception as error:
            tally.fail(target, data, error)
        advance(len(batch))
    tracemalloc.stop()


def fuzz_hypothesis(tally: Tally, examples: int, advance: Callable[[int], None]) -> None:
    """The same parsers, with inputs that Hypothesis draws and, when one fails, makes small."""
    edits = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.binary(max_size=9)), min_size=1, max_size=4)

    def apply(seed: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
        for how, at, new in changes:
            seed = seed[:at] + new + seed[at + (0, 1, len(new))[how] :]
        return seed

    def explore(target: Target) -> None:
        last = b""

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(st.binary(max_size=200) | st.builds(apply, st.sampled_from(target.seeds), edits))
        def check(data: bytes) -> None:
            nonlocal last
            last = data
            tally.feed(target, data, "hypothesis")
            advance(1)

        try:
            check()
        except Exception as error:
            tally.fail(target, last, error)

    for target in TARGETS.values():
        explore(target)


def fuzz_atheris(tally: Tally, inputs: int, advance: Callable[[int], None]) -> None:
    """The same parsers in processes of their own, because libFuzzer ends its process."""
    if importlib.util.find_spec("atheris") is None:
        tally.notes.append(
            "atheris is not installed, so nothing was guided by coverage (pip install atheris; needs clang)"
        )
        return
    runs = max(1, inputs // len(TARGETS))
    for target in TARGETS.values():
        with tempfile.TemporaryDirectory() as folder:
            for index, seed in enumerate(target.seeds):
                (Path(folder) / f"seed-{index}").write_bytes(seed)
            report = Path(folder) / "report.json"
            command = [sys.executable, "-m", "tests.soak.fuzz_atheris", target.name, str(runs), folder, str(report)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            counts = json.loads(report.read_text()) if report.exists() else {}
            tally.outcomes[target.name].update(counts)
            tally.engines["atheris"] += sum(counts.values())
            advance(sum(counts.values()))
            if done.returncode or not counts:
                crashes = sorted(Path(folder).glob("crash-*")) + sorted(Path(folder).glob("timeout-*"))
                data = crashes[0].read_bytes() if crashes else b""
                tally.failures.append(Failure(target.name, data, done.stderr[-2000:]))


def resident() -> int:
    """Bytes that this process holds, without what the allocator only keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # musl has none, and gives memory back by itself
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(
    inputs: int,
    seconds: float = 3600.0,
    seed: int | None = None,
    advance: Callable[[int], None] = lambda _count: None,
    guided: bool = True,
) -> Tally:
    """Gives so many inputs to the parsers: 5 of 100 from Hypothesis, 10 from atheris, the rest from here."""
    tally = Tally()
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    tally.notes.append(f"seed {seed}")
    for target in TARGETS.values():
        warm_up(target)
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is an outcome that no caller expects
        start = resident()
        fuzz_mutations(tally, inputs * 85 // 100, rng, until, advance)
        tally.resident = resident() - start  # before Hypothesis, which remembers what it tried
        fuzz_hypothesis(tally, max(10, inputs * 5 // 100 // len(TARGETS)), advance)
        if guided:
            fuzz_atheris(tally, inputs // 10, advance)
        fuzz_mutations(tally, inputs - tally.inputs, rng, until, advance)
    if tally.resident > MAX_RESIDENT:
        grown = f"the process grew by {tally.resident >> 20} MiB (at most {MAX_RESIDENT >> 20} are allowed)"
        tally.failures.append(Failure("all", b"", grown))
    return tally


def summary(tally: Tally, seconds: float) -> str:
    """One page on what happened."""
    lines = [f"{'parser':<24}{'inputs':>9}{'accepted':>10}{'refused':>9}{'slowest':>11}{'memory':>10}  refused with"]
    for name, outcomes in tally.outcomes.items():
        refused = {kind: count for kind, count in outcomes.most_common() if kind != "accepted"}
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in refused.items())
        lines.append(
            f"{name:<24}{sum(outcomes.values()):>9,}{outcomes['accepted']:>10,}{sum(refused.values()):>9,}"
            f"{tally.slowest[name] / 1000:>8.1f} ms{tally.allocated[name] / 1024:>6.0f} KiB  {kinds}"
        )
    engines = ", ".join(f"{engine} {count:,}" for engine, count in tally.engines.most_common())
    lines += [
        "",
        f"{tally.inputs:,} inputs in {seconds:.0f} s ({engines})",
        f"bounds: {MAX_SECONDS:.0f} s an input, {MAX_ALLOCATED >> 20} MiB at once, {MAX_RESIDENT >> 20} MiB in all",
        f"the process grew by {tally.resident / 2**20:.1f} MiB",
        *tally.notes,
    ]
    for failure in tally.failures:
        lines += ["", f"FAILED {failure.target}: {failure.what}"]
        lines.append(f"  again: python -m tests.soak.fuzz --replay {failure.target!r} {failure.data.hex() or repr('')}")
    lines += [
        "",
        f"{len(tally.failures)} failures" if tally.failures else "no crash, no hang, nothing beyond the bounds",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop earlier, after so long")
    parser.add_argument("--seed", type=int, help="repeat the mutations of an earlier run")
    parser.add_argument("--replay", nargs=2, metavar=("PARSER", "HEX"), help="give one input to one parser")
    options = parser.parse_args(arguments)
    if options.replay:
        print(TARGETS[options.replay[0]].parse(bytes.fromhex(options.replay[1])))
        return 0
    began = time.monotonic()
    columns = (TextColumn("fuzzing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("", total=options.inputs)

        def advance(count: int) -> None:
            faulthandler.dump_traceback_later(STUCK, exit=True)  # a parser that hangs in C shows where
            progress.advance(bar, count)

        tally = run(options.inputs, options.seconds, options.seed, advance)
    faulthandler.cancel_dump_traceback_later()
    print(summary(tally, time.monotonic() - began))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
