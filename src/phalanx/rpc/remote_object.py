"""Handles for objects that live on another rank."""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn

from ..frames import hide_frames, hides_frames
from .caller import CallerLink
from .registry import Registry

__all__ = ["MethodCaller", "RemoteMethod", "RemoteObject"]


class MethodCaller(NamedTuple):
    """The agent's ways to make a call, for handles of objects.

    Each takes the link to the object's rank, the name of the method, the number of the object, and then what the method
    of `Agent` takes that has its name.
    """

    call: Callable[..., Any]
    call_async: Callable[..., concurrent.futures.Future[Any]]
    acall: Callable[..., Awaitable[Any]]
    notify: Callable[..., None]
    registry: Registry
    """The classes that are registered on this rank, for the types of results."""


class RemoteObject:
    """A handle for an object on another rank. Its public methods run there. Dropping the handle frees the object.

    ```python
    counter = agent.create(1, "Counter", start=10)
    counter.increment(5)                       # waits for the answer; takes timeout= too
    counter.increment.call_async(5)            # concurrent.futures.Future
    await counter.increment.acall(5)
    counter.increment.notify(5)
    ```
    """

    __slots__ = ("__weakref__", "_caller", "_free", "_link", "_name", "_number")

    def __init__(self, caller: MethodCaller, link: CallerLink, name: str, number: int) -> None:
        self._caller = caller
        self._link = link
        self._name = name
        self._number = number
        free = functools.partial(link.free, number)
        self._free = weakref.finalize(self, link.poller.run_soon, free)
        self._free.atexit = False

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):  # the object's own attributes may be missing, in a copy that is being made
            raise AttributeError(f"{name!r} of a remote object is private (only public methods can be called)")
        return RemoteMethod(self, name)

    def __copy__(self) -> RemoteObject:
        return self  # a second handle would free the object a second time

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteObject:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle of a remote object cannot be pickled: it belongs to the agent that made it")

    def __repr__(self) -> str:
        return f"<remote {self._name} on rank {self._link.world_rank}>"


class RemoteMethod:
    """A method of a remote object."""

    __slots__ = ("_name", "_object")

    def __init__(self, remote: RemoteObject, name: str) -> None:
        self._object = remote
        self._name = name

    def __call__(self, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any) -> Any:
        """Calls the method and waits for its answer; as `Agent.call`."""
        try:
            remote, returns = self._object, self._type(returns)
            return remote._caller.call(remote._link, self._name, remote._number, args, kwargs, timeout, returns)
        except BaseException as error:
            hide_frames(error)
            raise

    @hides_frames
    def call_async(
        self, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """As `Agent.call_async`."""
        remote, returns = self._object, self._type(returns)
        return remote._caller.call_async(remote._link, self._name, remote._number, args, kwargs, timeout, returns)

    async def acall(self, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any) -> Any:
        """As `Agent.acall`."""
        try:
            remote, returns = self._object, self._type(returns)
            return await remote._caller.acall(remote._link, self._name, remote._number, args, kwargs, timeout, returns)
        except BaseException as error:
            hide_frames(error)
            raise

    def _type(self, returns: Any) -> Any:
        """The type of the result: as asked for, else the annotation of the class, if it is registered here, too."""
        remote = self._object
        return returns if returns is not None else remote._caller.registry.method_result_type(remote._name, self._name)

    @hides_frames
    def notify(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """As `Agent.notify`."""
        remote = self._object
        remote._caller.notify(remote._link, self._name, remote._number, args, kwargs, timeout)
