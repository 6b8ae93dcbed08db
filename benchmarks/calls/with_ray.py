"""Ray: an actor with one method. Runs in a Python that has Ray and NumPy, and neither Phalanx nor its requirements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from .worker import Call

__all__ = ["open_caller", "open_server"]

_STORE = 512 << 20
"""Bytes of Ray's store of objects: many times the largest array, so that it need not wait to free old ones."""


class _Caller:
    def __init__(self, timeout: float) -> None:
        import ray

        # One core for the actor: it is all that runs.
        ray.init(
            num_cpus=1,
            object_store_memory=_STORE,
            include_dashboard=False,
            log_to_driver=False,
        )

        class Echo:
            """In here, so that it travels by value: the actor's process cannot import this module."""

            def echo(self, x: Any) -> Any:
                return x

        self.version = f"Ray {ray.__version__}"
        self._ray, self._timeout = ray, timeout
        self._actor = ray.remote(Echo).remote()

    def echo(self, x: Any) -> Call:
        get, remote, timeout = self._ray.get, self._actor.echo.remote, self._timeout

        def call() -> Any:
            return get(remote(x), timeout=timeout)

        return call

    def in_flight(self, x: bytes, count: int) -> Call:
        get, remote, timeout = self._ray.get, self._actor.echo.remote, self._timeout

        def call() -> list[Any]:
            futures = [remote(x) for _ in range(count)]
            return [get(future, timeout=timeout) for future in futures]

        return call

    def array(self, x: npt.NDArray[Any]) -> Call:
        return self.echo(x)

    def close(self) -> None:
        self._ray.shutdown()


class _Seat:
    """Rank 1 has nothing to do: Ray starts the actor's process itself."""

    version = ""

    def close(self) -> None:
        """Nothing."""


def open_caller(address: str, timeout: float) -> _Caller:
    """The side that calls."""
    return _Caller(timeout)


def open_server(address: str, timeout: float) -> _Seat:
    """The side that would answer."""
    return _Seat()
