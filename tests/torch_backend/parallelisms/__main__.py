"""`python -m tests.torch_backend.parallelisms --backend phalanx --ranks 2`: prints losses and hashes as JSON.

With two backends they are compared: `--backend phalanx,gloo`.
"""

from __future__ import annotations

import argparse
import json
import sys

from . import run
from .compare import differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="phalanx,gloo", help="one, or two with a comma between them")
    parser.add_argument("--ranks", type=int, default=2, help="an even number")
    parser.add_argument("--only", default="", help="a part of the names of those to run")
    args = parser.parse_args()
    found = {backend: run(backend, args.ranks, only=args.only) for backend in args.backend.split(",")}
    print(json.dumps(found, indent=1))
    wrong = differences(*found.values(), exact=args.ranks == 2) if len(found) == 2 else []
    if len(found) == 2:
        parts = len(next(iter(found.values())))
        print(f"{parts} parts, {len(wrong)} differences", *wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
