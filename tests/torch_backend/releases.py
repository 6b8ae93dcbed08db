"""The releases of torch that the plug-in is tested on, as the package index has them: the last of each 2.x since 2.6.

python tests/torch_backend/releases.py             all of them, the oldest first
python tests/torch_backend/releases.py --newest
"""

from __future__ import annotations

import re
import subprocess
import sys

OLDEST = (2, 6)


def releases() -> list[str]:
    """Reads the index; empty where there is none to read.

    A CPU build counts as the release that it is of.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    listed = subprocess.run(command, text=True, capture_output=True, check=False).stdout
    line = next((line for line in listed.splitlines() if line.startswith("Available versions:")), "")
    numbers = {tuple(map(int, found)) for found in re.findall(r"\b(\d+)\.(\d+)\.(\d+)\b", line)}
    last = {number[:2]: number for number in sorted(numbers) if number[:2] >= OLDEST}
    return [".".join(map(str, number)) for number in last.values()]


if __name__ == "__main__":
    found = releases()
    print(*found[-1:] if "--newest" in sys.argv else found)
