"""`python -m phalanx` is the same as `phalanx`."""

from __future__ import annotations

from phalanx.cli import main

if __name__ == "__main__":
    main()
