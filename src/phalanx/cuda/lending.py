"""Long messages between ranks that share a GPU: the receiver copies the sender's array from where it lies.

The sender offers its array: a handle by which the receiver opens the memory, once for each allocation. The receiver
copies it inside the GPU, and says so. Until then the sender waits. If it gives up before, it sets a word on the GPU,
its own for this offer, and only then raises: a receiver looks at that word when its copy has ended, and does not take
what it copied if the word is set. So nobody receives what a sender has changed since, and nobody but the receiver
itself writes to its memory. The word also tells whether the sender gave up because its group has broken: then the
receiver will hear the reason, which may be a third rank.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..deadline import Deadline
from ..errors import ProtocolError
from .arrays import DeviceArray
from .driver import HANDLE_BYTES, CudaDriver, CudaError, driver
from .host_copies import LONGEST, host_address, host_copies
from .waiting import wait_for_stream

__all__ = ["ArrayOffer", "Loan", "Loans", "Revoked", "decode_offer"]

WORDS = 4096
"""Offers that can be open at a time; one that was given up stays open."""
_WORD_BYTES = 4
_GIVEN_UP, _BROKEN = 1, 2
"""Values of a word that is set: the sender had a reason of its own, or its group has broken."""


class Revoked(Exception):
    """The sender has given its offer up.

    Args:
        broken: True if it did because its group has broken.
    """

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.broken = broken


class ArrayOffer(msgspec.Struct, frozen=True, array_like=True):
    """An array as its sender tells of it."""

    lender: bytes
    """The sender's, by which the receiver knows what it has opened of it."""
    handle: bytes
    buffer: int
    """Tells an allocation from another one that lay at the same address."""
    base: int
    """Where the allocation begins in the sender, and its size."""
    size: int
    address: int
    """Where the array begins."""
    words: bytes
    """The handle of the words."""
    word: int
    """Which of them is this offer's. Also the number by which the receiver says that it is done."""


decode_offer = msgspec.msgpack.Decoder(ArrayOffer).decode


class Loan:
    """An offer, on the sender's side. It is ended or revoked, once."""

    def __init__(self, loans: Loans, offer: ArrayOffer, owner: Any) -> None:
        self.offer = offer
        self._loans = loans
        self._owner = owner
        """Keeps the memory until it is over."""

    def end(self) -> None:
        """The receiver is done."""
        owner, self._owner = self._owner, None
        if owner is not None:
            self._loans._free.append(self.offer.word)

    def revoke(self, *, broken: bool) -> None:
        """Makes sure that nobody takes the array from now on. Does nothing if the receiver is done.

        Args:
            broken: True if that is because the group has broken.
        """
        owner, self._owner = self._owner, None
        if owner is not None:
            self._loans._set_word(self.offer.word, _BROKEN if broken else _GIVEN_UP)


class _Opened(NamedTuple):
    """An allocation of another rank."""

    here: int
    base: int
    size: int


class Loans:
    """The offers of a group on one GPU, and what this rank has opened of others."""

    def __init__(self, device: int) -> None:
        self._driver: CudaDriver = driver()
        self._device = device
        self._name = secrets.token_bytes(8)
        self._lock = threading.Lock()
        self._table = 0
        self._table_handle = b""
        self._free: list[int] = []
        self._numbers = itertools.count()
        self._handles: dict[int, bytes] = {}
        """Of this rank's allocations, by their buffer; empty for those that cannot be opened."""
        self._opened: dict[tuple[bytes, int | bytes], _Opened] = {}
        self._closed = False

    def offer(self, array: DeviceArray) -> Loan | None:
        """Offers an array that is computed; None if its memory cannot be opened by others, or there is no word left."""
        with self._lock, self._driver.using(self._device):
            try:
                found = self._driver.allocation(array.address)
                if found.buffer not in self._handles:
                    self._handles[found.buffer] = self._driver.export(found.base) if found.exports else b""
                handle = self._handles[found.buffer]
                if not handle or (not self._table and not self._make_table()):
                    return None
            except CudaError:
                return None
            word = self._free.pop() if self._free else next(self._numbers)
            if word >= WORDS:
                return None
        told = self._name, handle, found.buffer, found.base, found.size, array.address, self._table_handle, word
        return Loan(self, ArrayOffer(*told), array)

    def take(self, offer: ArrayOffer, target: Any, nbytes: int) -> None:
        """Copies an array that was offered to `target`, a `DeviceArray` or an array of the host.

        Raises:
            Revoked: The sender has given up. The target may have any values.
            ProtocolError: The offer makes no sense.
            CudaError: The memory cannot be opened; the sender may have ended.
        """
        inside = offer.base <= offer.address and offer.address + nbytes <= offer.base + offer.size
        if not inside or not 0 <= offer.word < WORDS or {len(offer.handle), len(offer.words)} != {HANDLE_BYTES}:
            raise ProtocolError("malformed offer of an array on a GPU")
        copies, known = host_copies(self._device), self._driver
        seen, give_back = copies.lend((1,), np.dtype(np.uint32))
        # Whatever happens, nothing may write to the target later: so this waits longer than the caller's deadline.
        patience = Deadline(LONGEST)
        with self._lock, known.using(self._device):
            array = self._open(offer.lender, offer.buffer, offer.handle, offer.base, offer.size)
            words = self._open(offer.lender, offer.words, offer.words, 0, 0)
            here = array + offer.address - offer.base
            if isinstance(target, DeviceArray):
                target.ready.wait(patience)
                known.copy(target.address, here, nbytes, copies.stream)
            else:
                known.copy_to_host(host_address(target), here, nbytes, copies.stream)
            known.copy_to_host(host_address(seen), words + offer.word * _WORD_BYTES, _WORD_BYTES, copies.stream)
            wait_for_stream(known, copies.stream, patience)
        word = int(seen[0])
        give_back()
        if word:
            raise Revoked(word == _BROKEN)

    def close(self) -> None:
        """Gives everything back."""
        with self._lock, self._driver.using(self._device):
            self._closed = True
            for opened in self._opened.values():
                _quietly(self._driver.close, opened.here)
            self._opened.clear()
            if self._table:
                _quietly(self._driver.free, self._table)
                self._table = 0

    def _open(self, lender: bytes, key: int | bytes, handle: bytes, base: int, size: int) -> int:
        found = self._opened.get((lender, key))
        if found is not None:
            return found.here
        if self._closed:
            raise CudaError("cuIpcOpenMemHandle", 0, "the group is closed")
        for name, old in list(self._opened.items()):  # where it lay there lies this now, so it was freed
            if name[0] == lender and old.base < base + size and base < old.base + old.size:
                self._driver.close(self._opened.pop(name).here)
        here = self._driver.open(handle)
        self._opened[lender, key] = _Opened(here, base, size)
        return here

    def _make_table(self) -> bool:
        """Makes the words, all 0. The caller holds the lock."""
        zeros, copies = np.zeros(WORDS, np.uint32), host_copies(self._device)
        table = self._driver.allocate(zeros.nbytes)
        try:
            self._table_handle = self._driver.export(table)
            self._driver.copy_to_device(table, host_address(zeros), zeros.nbytes, copies.stream)
            wait_for_stream(self._driver, copies.stream, Deadline(LONGEST))
        except CudaError:
            _quietly(self._driver.free, table)
            return False
        self._table = table
        return True

    def _set_word(self, word: int, value: int) -> None:
        """Sets a word, for good. If the GPU fails meanwhile, nobody can read the array any more, either."""
        values, copies = np.full(1, value, np.uint32), host_copies(self._device)
        with self._lock, self._driver.using(self._device):
            if not self._table:
                return
            address = self._table + word * _WORD_BYTES
            try:
                self._driver.copy_to_device(address, host_address(values), _WORD_BYTES, copies.stream)
                wait_for_stream(self._driver, copies.stream, Deadline(LONGEST))
            except CudaError:
                return


def _quietly(call: Any, address: int) -> None:
    try:
        call(address)
    except CudaError:
        return
