"""The contenders: torch.distributed on Phalanx's plug-in, and on Gloo."""

from __future__ import annotations

from benchmarks.checkout import CheckoutContender

__all__ = ["gloo", "plugin"]

_LIBRARY = "benchmarks.under_torch.with_lists"


def plugin(transport: str) -> CheckoutContender:
    """torch.distributed on Phalanx, over one transport."""
    name, label = ("phalanx", "torch on Phalanx") if transport == "auto" else ("phalanx-tcp", "torch on Phalanx, TCP")
    env = {"PHALANX_TRANSPORT": transport}
    return CheckoutContender(name=name, label=label, library=f"{_LIBRARY}:phalanx", is_ours=True, env=env)


def gloo() -> CheckoutContender:
    """torch.distributed on Gloo."""
    return CheckoutContender(name="gloo", label="Gloo", library=f"{_LIBRARY}:gloo")
