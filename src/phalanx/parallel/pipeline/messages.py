"""Messages between stages: each holds the values of a micro-batch, or their gradients.

A message says itself how many tensors it holds and of which shapes, so micro-batches and steps may differ, and nothing
has to be agreed on before. Nothing is pickled. Tensors keep their order in memory: kernels of torch may round
differently for another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...errors import UsageError

__all__ = [
    "FAILED",
    "Message",
    "Mode",
    "Values",
    "copied",
    "kind_of",
    "pack_gradients",
    "pack_values",
    "received",
    "size_of",
    "split_value",
    "to_send",
    "unpack_gradients",
    "unpack_values",
]

Mode = Literal["step", "evaluate"]
Message = list[list[Any]]
"""The kind and the attributes, then the packed tensors. All in lists: the codec takes longer for tuples."""

FAILED: Message = [["failed"], []]
"""Instead of what a stage would have sent, had it not failed."""


class Values(NamedTuple):
    """The values of a micro-batch, on their way from one stage to the next."""

    tensors: tuple[torch.Tensor | None, ...]
    single: bool
    """True for one tensor, False for a tuple."""
    examples: int
    """How many examples the micro-batch has."""
    of: int
    """How many examples the whole batch has."""

    @property
    def value(self) -> Any:
        """As the stage returned it."""
        return self.tensors[0] if self.single else self.tensors


def split_value(value: Any, stage: int, examples: int, of: int) -> Values:
    """The values that a stage returned, checked.

    Raises:
        UsageError: It is neither a tensor nor a tuple of them.
    """
    single = isinstance(value, torch.Tensor)
    parts = (value,) if single else value
    if not isinstance(parts, (tuple, list)) or not parts or not all(_may_travel(part) for part in parts):
        raise UsageError(
            f"stage {stage} returned {type(value).__name__}, which cannot be passed on (expected a tensor, or a tuple "
            "of tensors and None)"
        )
    return Values(tuple(parts), single, examples, of)


def pack_values(values: Values, mode: Mode) -> Message:
    """A message for the next stage."""
    packed = [_pack(tensor) for tensor in values.tensors]
    wants = [tensor is not None and tensor.requires_grad for tensor in values.tensors]
    return [[mode, values.single, values.examples, values.of, wants], packed]


def unpack_values(message: Message) -> tuple[Values, list[bool]]:
    """The values of a message, and whether the sender wants a gradient for each."""
    (_, single, examples, of, wants), packed = message
    return Values(tuple(_unpack(part) for part in packed), single, examples, of), wants


def pack_gradients(gradients: Sequence[torch.Tensor | None]) -> Message:
    """A message for the stage before: the gradients of what it sent, None where there are none."""
    return [["gradients"], [_pack(gradient) for gradient in gradients]]


def unpack_gradients(message: Message) -> list[torch.Tensor | None]:
    """The gradients of a message."""
    return [_unpack(part) for part in message[1]]


def kind_of(message: Message) -> str:
    """`"failed"`, `"gradients"`, or the mode of a rank that sends values."""
    kind: str = message[0][0]
    return kind


def size_of(message: Message) -> int:
    """The bytes of its tensors."""
    return sum(part[0].nbytes for part in message[1] if part is not None)


def copied(message: Message) -> Message:
    """A message with tensors of its own, as one that has travelled."""
    return [message[0], [None if part is None else [part[0].clone(), part[1]] for part in message[1]]]


def to_send(message: Message) -> Message:
    """A message for another rank: tensors on a GPU are copied to the host, with the name of their device."""
    if not any(part is not None and part[0].is_cuda for part in message[1]):
        return message
    return [
        message[0],
        [part if part is None else [part[0].cpu(), part[1], part[0].device.type] for part in message[1]],
    ]


def received(message: Message) -> Message:
    """A message as it was before `to_send`; what lay on a GPU lies on this rank's current one."""
    return [message[0], [part if part is None or len(part) == 2 else _moved(*part) for part in message[1]]]


def _moved(tensor: torch.Tensor, order: Any, device: str) -> list[Any]:
    return [tensor.to(device), order]


def _may_travel(part: Any) -> bool:
    return part is None or isinstance(part, torch.Tensor)


def _pack(tensor: torch.Tensor | None) -> Any:
    """The memory of a tensor as it lies, and how its dims are ordered in it; None for the usual order."""
    if tensor is None:
        return None
    plain = tensor.detach()
    if plain.is_contiguous():
        return [plain, None]
    order = sorted(range(plain.dim()), key=lambda dim: -plain.stride(dim))
    turned = plain.permute(order)
    return [turned, order] if turned.is_contiguous() else [plain.contiguous(), None]


def _unpack(packed: Any) -> torch.Tensor | None:
    if packed is None:
        return None
    tensor, order = packed
    return tensor if order is None else tensor.permute([order.index(dim) for dim in range(len(order))])
