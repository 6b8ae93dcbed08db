"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no reason to fail: pytest's own limit is enough against a hang.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")
