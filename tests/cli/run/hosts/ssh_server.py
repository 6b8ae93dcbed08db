"""An ssh server on loopback: `ssh_server.py FOLDER` makes a key there that it lets in, and prints its port."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import asyncssh


async def run_command(process: Any) -> None:
    """Runs what the client asks for, as sshd does: the command's input ends when the client is gone."""
    connection = process.channel.get_connection()
    client, server = connection.get_extra_info("peername"), connection.get_extra_info("sockname")
    ends = f"{client[0]} {client[1]} {server[0]} {server[1]}"
    child = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        process.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SSH_CONNECTION": ends, "RUN_TEST_MARK": os.environ["FOR_JOBS"]},
        start_new_session=True,
    )
    await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    code = await child.wait()
    await process.stdout.drain()
    process.exit(code if code >= 0 else 255)


async def serve(folder: Path) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(folder / "key"))
    (folder / "key").chmod(0o600)
    key.write_public_key(str(folder / "key.pub"))
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=str(folder / "key.pub"),
        process_factory=run_command,
        encoding=None,
    )
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
