"""One rank of one contender: `python -m phalanx.cli.bench.worker LIBRARY SOCKET TIMEOUT`.

It joins its world, and then does what the driver says, one line of JSON at a time. Between two orders it is blocked in
a read and takes no time from the contender that is being measured.
"""

from __future__ import annotations

import gc
import itertools
import os
import select
import socket
import sys
import threading
import time
import traceback

import msgspec

from .library import Call, DeviceLibrary, Library, LibraryLacks, SegmentLibrary, open_library
from .memory import Usage, watch_memory
from .operations import Arrays, aligned_array, find_operation, numpy_dtype
from .orders import Answer, CheckOrder, DropOrder, EndOrder, MemoryOrder, Order, PrepareOrder, RunOrder

__all__ = ["main", "timed"]


def timed(call: Call, iterations: int) -> float:
    """Seconds for so many calls. This is the loop that every contender is measured in."""
    clock = time.perf_counter
    begin = clock()
    for _ in itertools.repeat(None, iterations):
        call()
    return clock() - begin


class _BenchWorker:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._prepared: dict[str, tuple[str, Arrays, Call]] = {}

    def handle(self, order: Order) -> Answer:
        if isinstance(order, PrepareOrder):
            return self._prepare(order)
        if isinstance(order, CheckOrder):
            return self._check(order)
        if isinstance(order, RunOrder):
            return self._run(order)
        if isinstance(order, MemoryOrder):
            return self._memory(order)
        self._prepared.clear()
        return Answer()

    def _prepare(self, order: PrepareOrder) -> Answer:
        operation, library = find_operation(order.operation), self._library
        try:
            dtype = numpy_dtype(order.dtype)
        except ImportError:
            return Answer(lacks=f"{order.dtype} needs ml_dtypes: pip install ml_dtypes")
        count, out_count = operation.shape(library.rank, library.size, order.count)
        array = aligned_array
        if order.in_segment:
            assert isinstance(library, SegmentLibrary), "only a library that has a segment is asked for one"
            array = library.empty
        arrays = Arrays(array(count, dtype), None if out_count is None else array(out_count, dtype))
        try:
            call = library.call(order.operation, arrays)
        except LibraryLacks as error:
            return Answer(lacks=str(error))
        self._clear(arrays)
        self._prepared[order.slot] = (order.operation, arrays, call)
        return Answer()

    def _check(self, order: CheckOrder) -> Answer:
        """Makes one call with known numbers and checks the result: a wrong answer may not count as a fast one."""
        name, arrays, call = self._prepared[order.slot]
        operation, rank, size = find_operation(name), self._library.rank, self._library.size
        operation.before(rank, size, arrays.x)
        self._to_device(arrays)
        self._library.barrier()
        call()
        if isinstance(self._library, DeviceLibrary):
            self._library.to_host(arrays)
        right = operation.after(rank, size, *arrays)
        self._library.barrier()
        self._clear(arrays)
        return Answer() if right else Answer(error=f"{name} gave a wrong result on rank {rank}")

    def _run(self, order: RunOrder) -> Answer:
        _, _, call = self._prepared[order.slot]
        if order.iterations > 1:
            call()  # the caches have the arrays of another contender
        self._library.barrier()
        gc.disable()  # as timeit does: a collection belongs to what a program keeps, not to these calls
        try:
            seconds = timed(call, order.iterations)
        finally:
            gc.enable()
        # Some senders return early, and their library must be called once more for others to get their data.
        self._library.barrier()
        return Answer(seconds=seconds)

    def _memory(self, order: MemoryOrder) -> Answer:
        _, _, call = self._prepared[order.slot]
        self._library.barrier()

        def calls() -> None:
            timed(call, order.iterations)
            self._library.barrier()

        usage: Usage = watch_memory(calls)
        return Answer(memory=usage)

    def _clear(self, arrays: Arrays) -> None:
        """Zeros: they stay zeros in every reduction, and writing them makes all pages real."""
        arrays.x.fill(0)
        if arrays.out is not None:
            arrays.out.fill(0)
        self._to_device(arrays)

    def _to_device(self, arrays: Arrays) -> None:
        if isinstance(self._library, DeviceLibrary):
            self._library.to_device(arrays)


def _end_with_the_driver(connection: socket.socket) -> None:
    """Ends this process when the driver is gone, also from inside a call that would never return."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll()
    os._exit(1)


_decode = msgspec.json.Decoder(Order).decode


def main(arguments: list[str]) -> None:
    """Serves one driver until it says that this is the end."""
    name, path, timeout = arguments
    os.chdir(os.path.dirname(path))  # a whole path may be longer than the address of a Unix socket can be
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.basename(path))
    threading.Thread(target=_end_with_the_driver, args=(connection,), name="bench-lifeline", daemon=True).start()
    reading = connection.makefile("rb")
    encode = msgspec.json.Encoder().encode

    def tell(answer: Answer) -> None:
        connection.sendall(encode(answer) + b"\n")

    try:
        library = open_library(name, float(timeout))
        worker = _BenchWorker(library)
        tell(Answer(rank=library.rank, size=library.size, version=library.version))
    except Exception:
        tell(Answer(error=traceback.format_exc()))
        sys.exit(1)
    for line in reading:
        order = _decode(line)
        if isinstance(order, EndOrder):
            break
        try:
            tell(worker.handle(order))
        except Exception:
            tell(Answer(error=traceback.format_exc()))
    worker.handle(DropOrder())
    library.close()
    tell(Answer())


if __name__ == "__main__":
    main(sys.argv[1:])
