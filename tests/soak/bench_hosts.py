"""`phalanx bench` with its ranks on two hosts: two network namespaces with a cable between them.

```
python -m tests.soak.bench_hosts [--ranks 2,4] [--sizes 8,16K,1M] [--against gloo,openmpi-tcp] [--json FILE]
```

The first half of the ranks is on one host, the second half on the other. Needs root. Open MPI starts its ranks on the
second host by a script that stands in for ssh.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.hosts.network import MAIN, Host, Network, why_not

from phalanx.cli.bench.contenders import Contender, Missing, Site, find_peer, ours
from phalanx.cli.bench.plan import DEFAULT_OPERATIONS, BenchPlan
from phalanx.cli.bench.session import run
from phalanx.cli.bench.show import all_errors, show
from phalanx.cli.bench.sizes import parse_sizes
from phalanx.cli.run.plan import cores

ROOT = Path(__file__).resolve().parents[2]
PORTS = iter(range(29500, 60000))
"""No other process is in these namespaces, so any port is free, but for those of worlds that ended a moment ago."""
NAMES = {1: "first", 2: "second"}


def inside(host: Host) -> list[str]:
    """What stands before a command that runs on a host. Open MPI tells hosts apart by their names."""
    named = f'hostname {NAMES[host.number]}; exec "$0" "$@"'
    return ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", named]


def site_of(network: Network, folder: Path) -> Site:
    """Both hosts, for all contenders."""
    first, second = network.first, network.second
    agent = folder / "agent"
    agent.write_text(f"""#!/bin/sh
shift
exec ip netns exec {second.namespace} unshare --uts sh -c "hostname {NAMES[2]}; $*"
""")
    agent.chmod(0o700)

    def openmpi(n: int) -> list[str]:
        slots = f"{first.ipv4}:{n - n // 2},{second.ipv4}:{n // 2}"
        # Each host believes that all cores are its own: it would bind its first rank to the first core, as the other
        # does, and would not tell its ranks to give way.
        patient = ["--mca", "mpi_yield_when_idle", "1"] if n > cores() else []
        where = ["--host", slots, "--map-by", "slot", "--prtemca", "plm_ssh_agent", str(agent)]
        return [*where, "--bind-to", "none", "--prtemca", "prte_if_include", MAIN, *patient]

    return Site(
        master=first.ipv4,
        port=lambda: next(PORTS),
        interface=MAIN,
        prefix=lambda rank, n: inside(first if rank < n - n // 2 else second),
        openmpi=openmpi,
    )


def main() -> None:
    """Measures and prints; the exit code is 1 if Phalanx failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.bench_hosts", description=__doc__.split("\n")[0])
    parser.add_argument("operations", nargs="*", default=list(DEFAULT_OPERATIONS))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="8,1K,16K,128K,1M,8M,64M")
    parser.add_argument("--against", default="gloo,openmpi-tcp")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(reason)
    mpirun = Path(os.environ.get("PHALANX_TEST_OPENMPI", ROOT / ".venv-mpi" / "openmpi" / "bin" / "mpirun"))
    mpiruns = {"openmpi": mpirun if mpirun.exists() else None}
    found = [find_peer(name, mpiruns) for name in arguments.against.split(",") if name]
    missing = [peer for peer in found if isinstance(peer, Missing)]
    plan = BenchPlan(
        operations=arguments.operations,
        sizes=parse_sizes(arguments.sizes),
        dtypes=["float32"],
        ranks=[int(count) for count in arguments.ranks.split(",")],
        contenders=[ours("tcp"), *(peer for peer in found if isinstance(peer, Contender))],
        rounds=arguments.rounds,
    )
    with Network() as network, tempfile.TemporaryDirectory(prefix="phalanx-hosts-") as folder:
        command = f"python -m tests.soak.bench_hosts --ranks {arguments.ranks} --sizes {arguments.sizes}"
        site = site_of(network, Path(folder))
        report, code = run(plan, missing=missing, command=command, site=site, json_file=arguments.json)
    show(report, sys.stdout)
    for text in all_errors(report):
        print(text, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
