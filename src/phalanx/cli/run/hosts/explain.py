"""Words for all that can go wrong between ssh and a node's first word. No I/O."""

from __future__ import annotations

import re

__all__ = ["why_no_hello"]

SSH_FAILED, NOT_FOUND, NOT_EXECUTABLE = 255, 127, 126
_SHOWN = 5
"""Lines of the other side that are shown."""

_SSH_HINTS = (
    ("could not resolve hostname|name or service not known", "there is no such host: is the name spelt right?"),
    (
        "permission denied|too many authentication failures",
        "ssh must get in without a password: put your key there (ssh-copy-id {host}) or start an agent (ssh-add)",
    ),
    ("host key verification failed", "log in once by hand and look at the host's key: ssh {host}"),
    ("connection refused", "no ssh server listens there, or on another port: ~/.ssh/config can say which"),
    ("timed out|no route to host|network is unreachable", "the host is down, or a firewall is in between"),
    ("bad configuration option|unknown option|usage: ssh", "look at what --ssh says"),
)


def why_no_hello(host: str, *, code: int | None, said: str, python: str, command: str) -> str:
    """Why a node did not come up, in one or two lines: what failed, and what to do.

    Args:
        host: The host, as it was given to ssh.
        code: The exit code of the ssh process; None if it is still silent.
        said: All that came from it.
        python: The interpreter that was to be started there.
        command: The ssh command.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = "; ".join(lines[-_SHOWN:])
    if code is None:
        heard = f"; it said: {last}" if lines else ""
        return f"host {host}: no answer in time (does `{command} {host} true` return at once?{heard})"
    if code == SSH_FAILED:
        found = lines[-1] if lines else f"{command} ended with exit code {code}"
        hint = next((hint for words, hint in _SSH_HINTS if re.search(words, said, re.IGNORECASE)), "")
        hint = hint or f"try it by hand: {command} {{host}} true"
        return f"host {host} cannot be reached by ssh: {found} ({hint.format(host=host)})"
    if "No module named phalanx.cli" in said or "No module named 'phalanx.cli" in said:
        return f"host {host}: Phalanx is installed there, but an older version (install the one that is here)"
    if "No module named phalanx" in said or "No module named 'phalanx'" in said:
        return (
            f"host {host}: {python} there has no Phalanx (install it there, or name an interpreter that has it with "
            "--remote-python)"
        )
    if code in (NOT_FOUND, NOT_EXECUTABLE):
        return f"host {host}: there is no {python} there (--remote-python names the interpreter of the hosts)"
    return f"host {host}: {python} there ended with exit code {code}: {last or 'it said nothing'}"
