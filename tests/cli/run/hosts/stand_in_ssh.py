"""Stands in for ssh: `stand_in_ssh.py [-v] [host=namespace …] HOST COMMAND`. It runs the command on this machine.

As ssh it relays bytes both ways, so that a command outlives it, and sees the end of its input, if it is killed. A host
given as `host=namespace` runs in that network namespace. Some names stand for hosts with a fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

FAULTS = {
    "nowhere": "ssh: Could not resolve hostname nowhere: Name or service not known",
    "locked": "root@locked: Permission denied (publickey,password).",
    "refusing": "ssh: connect to host refusing port 22: Connection refused",
    "strange": "Host key verification failed.",
}


def relay(source: int, sink: int) -> None:
    try:
        while data := os.read(source, 65536):
            view = memoryview(data)
            while view:
                view = view[os.write(sink, view) :]
    except OSError:
        pass
    os.close(sink)


def main(words: list[str]) -> int:
    namespaces = dict(word.split("=", 1) for word in words[:-2])
    host, command = words[-2:]
    if host in FAULTS:
        sys.stderr.write(FAULTS[host] + "\n")
        return 255
    if host == "silent":
        threading.Event().wait()
    through = ["ip", "netns", "exec", namespaces[host]] if host in namespaces else []
    environment = dict(os.environ)
    if not namespaces:
        environment["SSH_CONNECTION"] = "127.0.0.1 50000 127.0.0.1 22"
    sys.stdout.write("Last login: never\n")  # as login shells do that say more than they should
    sys.stdout.flush()
    child = subprocess.Popen(
        [*through, "/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    threading.Thread(target=relay, args=(0, os.dup(child.stdin.fileno())), daemon=True).start()
    child.stdin.close()
    outputs = [
        threading.Thread(target=relay, args=(stream.fileno(), sink))
        for stream, sink in ((child.stdout, 1), (child.stderr, 2))
    ]
    for thread in outputs:
        thread.start()
    for thread in outputs:
        thread.join()
    code = child.wait()
    os._exit(code if code >= 0 else 255)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
