"""Uploads a release that was built and tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

from .check import metadata_of
from .pythons import ROOT

__all__ = ["hindrances", "publish"]

_KEY = "TWINE_PASSWORD"


def hindrances(metadata: Message) -> list[str]:
    """The reasons why this checkout cannot be published yet, each with what to do.

    Args:
        metadata: Of the sdist.
    """
    found = []
    version = str(metadata["Version"])
    heading = re.search(rf"^## {re.escape(version)} \u2013 (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    if heading is None or heading[1] == "unreleased":
        found.append(f"CHANGELOG.md has no date for {version}: write it in place of 'unreleased'")
    if not metadata.get_all("Project-URL"):
        found.append("pyproject.toml has no [project.urls]: say where the source and the documentation are")
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        found.append("the checkout has changes that are not committed")
    tags = subprocess.run(["git", "tag", "--points-at"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if f"v{version}" not in tags.split():
        found.append(f"this commit has no tag v{version}: git tag v{version}")
    if not os.environ.get(_KEY):
        found.append(f"{_KEY} is not set to a key of the package index")
    return found


def publish(paths: list[Path]) -> None:
    """Uploads all files, by the key in the environment; nothing is asked."""
    source = next(path for path in paths if path.suffix != ".whl")
    reasons = hindrances(metadata_of(source))
    local = [path.name for path in paths if path.suffix == ".whl" and "-linux_" in path.name]
    if local:
        reasons.append(f"{', '.join(local)}: a wheel of one machine only; leave --here out")
    if reasons:
        sys.exit("cannot publish:\n  " + "\n  ".join(reasons))
    environment = {"TWINE_USERNAME": "__token__", **os.environ}
    command = [sys.executable, "-m", "twine", "upload", "--non-interactive", *map(str, paths)]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)
