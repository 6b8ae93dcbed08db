"""The only user of what only Linux has. Each function here has an answer for other systems, too.

On macOS there is no /proc, no memory without a name, no signal at the death of a parent. `PHALANX_PORTABLE=1` has every
function here give its portable answer on Linux, too, and turns the native core off: so the tests see what a Mac sees.

The guardian and the bootstrap of `phalanx run` load this file without the package, and every rank waits for that. So it
imports nothing at its top but what any Python has loaded, and is the one module outside `phalanx.config` that reads a
variable.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

__all__ = [
    "CGROUPS",
    "LINUX",
    "PROC",
    "SHARED_MEMORY",
    "adopt_orphans",
    "control_group_files",
    "core_mask",
    "core_quota",
    "cores_of_set",
    "die_with_parent",
    "give_back_memory",
    "hold_port",
    "host_identity",
    "hung_up",
    "interface_addresses",
    "is_sealed",
    "keepalive_options",
    "link_numbers",
    "loaded_libraries",
    "make_memory_file",
    "memory_namespace",
    "memory_seals",
    "open_descriptor_of",
    "process_started",
    "process_state",
    "process_table",
    "processor_lines",
    "reap_child",
    "reserve",
    "resident_memory",
    "run_delay",
    "running_tasks",
    "undelivered",
    "usable_cores",
    "wake_pipe",
    "who_is",
    "within_quota",
]

_OFF = ("", "0", "false", "no", "off")
LINUX = sys.platform == "linux" and os.environ.get("PHALANX_PORTABLE", "").strip().lower() in _OFF
"""False: every answer is the portable one."""
PROC = "/proc" if LINUX else "/nonexistent/proc"
CGROUPS = "/sys/fs/cgroup" if LINUX else "/nonexistent/cgroup"
SHARED_MEMORY = "/dev/shm" if LINUX else "/nonexistent/shm"  # noqa: S108  (looked at, not relied on)
"""The kernel's folders, for the doctor, who looks at more of them than anybody else."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCOUTQ, _SIOCOUTQNSD = 0x5411, 0x894B


# -- processes -------------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """The cores that this process may use, which a container or a batch system may have limited; else all.

    A container's quota of 1.5 is one core: of two ranks that compute at once, one would be held back.
    """
    return within_quota(cores_of_set())


def within_quota(cores: int) -> int:
    """So many cores, or as many as this process's control groups grant it the time of; at least one."""
    quota = core_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cores_of_set() -> int:
    """The cores on which this process may run at all: its CPU set."""
    return core_mask().bit_count() or os.cpu_count() or 1


def core_mask() -> int:
    """The same as bits; 0 where the system does not tell."""
    return sum(1 << core for core in os.sched_getaffinity(0)) if LINUX else 0


def core_quota(proc: str = PROC, groups: str = CGROUPS) -> float | None:
    """The cores' worth of time that this process's control groups grant it, perhaps a fraction; None if no limit."""
    found = []
    for _, text in control_group_files("cpu", "cpu.max", "cpu.cfs_quota_us", proc, groups):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and int(quota) > 0:  # "max" and -1 mean none
            found.append(int(quota) / int(period or 100_000))
    return min(found, default=None)


def control_group_files(
    controller: str, name: str, name_v1: str, proc: str = PROC, groups: str = CGROUPS
) -> Iterator[tuple[str, str]]:
    """The path and text of a file in this process's control group and in each one above it: all of them bind.

    Args:
        controller: The kind of limit, as version 1 of control groups calls it.
        name: The file's name in version 2.
        name_v1: Its name in version 1.
        proc: Where the kernel tells of processes.
        groups: Where the control groups are.
    """
    for line in (_text_of(f"{proc}/self/cgroup") or "").splitlines():
        number, controllers, inside = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            roots, file = [groups, f"{groups}/unified"], name
        elif controller in controllers.split(","):
            roots, file = [f"{groups}/{controllers}", f"{groups}/{controller}"], name_v1
        else:
            continue
        steps = [part for part in inside.split("/") if part not in ("", "..")]
        for root in dict.fromkeys(roots):
            for depth in range(len(steps), -1, -1):
                path = "/".join([root, *steps[:depth], file])
                text = _text_of(path)
                if text is not None:
                    yield path, text


def _text_of(path: str) -> str | None:
    try:
        return _read(path).decode(errors="replace").strip()
    except OSError:
        return None


def die_with_parent() -> bool:
    """Has the kernel kill this process when its parent ends. False where it cannot: then somebody else must."""
    import signal

    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Makes this process the parent of what its descendants leave behind. False where only the first process can be."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    if not LINUX:
        return False
    try:
        import ctypes

        return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)) == 0
    except (ImportError, AttributeError, OSError):
        return False


def give_back_memory() -> None:
    """Gives pages that were freed, and that the C library keeps, back to the system. Only glibc knows how."""
    if not LINUX:
        return
    try:
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)
    except (ImportError, AttributeError, OSError):
        return  # another C library


def process_table(variable: str) -> list[tuple[int, int, int, str]]:
    """All processes that are alive: each with its parent, its session, and the value of a variable it was started with.

    Of other users' processes the value is empty. Without /proc, `ps` is asked, and a session is a process group: that
    is the same until a process makes a group of its own.
    """
    return _table_of_proc(variable) if LINUX else _table_of_ps(variable)


def _table_of_proc(variable: str) -> list[tuple[int, int, int, str]]:
    found = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        # The command's name stands in parentheses and may hold anything, even a parenthesis.
        fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if len(fields) < 4 or fields[0] in (b"Z", b"X"):
            continue
        value = _value_in(_read(f"/proc/{name}/environ"), variable)
        found.append((int(name), int(fields[1]), int(fields[3]), value))
    return found


def _value_in(environ: bytes, variable: str) -> str:
    _, found, rest = (b"\0" + environ).partition(f"\0{variable}=".encode())
    return rest.partition(b"\0")[0].decode("ascii", "replace") if found else ""


def _table_of_ps(variable: str) -> list[tuple[int, int, int, str]]:
    # The environment stands behind the command. BSD's letter for that is E, other systems' is e.
    letter = "E" if sys.platform == "darwin" else "e"
    found = []
    for line in _ps(f"ax{letter}ww", "-o", "pid=,ppid=,pgid=,stat=,command="):
        fields = line.split(None, 4)
        if len(fields) < 4 or fields[3][0] in "ZX":
            continue
        words = fields[4].split() if len(fields) > 4 else []
        values = [word.partition("=")[2] for word in words if word.startswith(f"{variable}=")]
        found.append((int(fields[0]), int(fields[1]), int(fields[2]), values[0] if values else ""))
    return found


def who_is(pid: int) -> tuple[str, int, str] | None:
    """The name of a process, its parent, and when it began; None if there is no such process."""
    if LINUX:
        # "pid (name) state ppid ...": the name may hold blanks and brackets, so look for the last one.
        head, _, tail = _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")
        fields = tail.split()
        return (head.partition("(")[2], int(fields[1]), fields[19]) if fields else None
    for line in _ps("-p", str(pid), "-o", "ppid=,lstart=,comm="):
        fields = line.split(None, 6)  # lstart is five words, as "Mon Nov 16 04:00:09 2026"
        return os.path.basename(fields[6].strip()), int(fields[0]), "-".join(fields[1:6])
    return None


def process_started(pid: int) -> str | None:
    """When a process began, as the system says it: it tells a process from a later one with its number."""
    found = who_is(pid)
    return None if found is None else found[2]


def process_state(pid: int) -> str:
    """The letter for what a process does, as `ps` shows it: T if it is stopped. Empty if there is no such process."""
    if LINUX:
        return _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2][1:2]
    return next((line.strip()[:1] for line in _ps("-p", str(pid), "-o", "stat=")), "")


def _ps(*arguments: str) -> list[str]:
    """The lines of `ps`, but for the one about itself."""
    import subprocess

    try:
        process = subprocess.Popen(
            ["/bin/ps", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LC_ALL": "C", "PATH": "/bin:/usr/bin"},
        )
    except OSError:
        return []
    lines = process.communicate()[0].decode(errors="replace").splitlines()
    return [line for line in lines if line.strip() and line.split(None, 1)[0] != str(process.pid)]


def reap_child(before: Callable[[int], object]) -> tuple[int, int] | None:
    """The next child that has ended, and its status as `os.waitpid` gives it; None if none has.

    Args:
        before: Called with its number while that is still its own, as far as the system allows: what it has left
            behind can then be ended without meeting another process.

    Raises:
        ChildProcessError: There are no children.
    """
    if LINUX:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        before(ended.si_pid)
        return os.waitpid(ended.si_pid, 0)
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == 0:
        return None
    before(pid)
    return pid, status


# -- the machine -----------------------------------------------------------------------------------------------------


def host_identity() -> str:
    """The same in all processes that share a kernel and a network namespace, different elsewhere."""
    if LINUX:
        try:
            boot = _read("/proc/sys/kernel/random/boot_id").decode().strip()
            network = os.stat("/proc/self/ns/net").st_ino
            if boot:
                return f"{boot}/{network}"
        except OSError:
            pass
    import socket

    return socket.gethostname()


def resident_memory() -> int:
    """Bytes of memory that this process holds; where that is not told, the most that it has held."""
    if LINUX:
        fields = _read("/proc/self/statm").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def run_delay() -> int:
    """Nanoseconds in which the main thread was ready to run and had no processor; 0 where that is not counted."""
    fields = _read("/proc/self/schedstat").split() if LINUX else []
    return int(fields[1]) if len(fields) > 1 else 0


def running_tasks() -> int:
    """Threads of all processes that have a core or wait for one, this one among them; 0 if that is not known."""
    found = (_text_of(f"{PROC}/loadavg") if LINUX else None) or ""
    fields = found.split()
    running = fields[3].partition("/")[0] if len(fields) > 3 else ""
    return int(running) if running.isdigit() else 0


def processor_lines() -> list[str]:
    """The lines by which the kernel describes the processor; empty where it does not."""
    return _read("/proc/cpuinfo").decode(errors="replace").splitlines() if LINUX else []


def loaded_libraries(part: str) -> list[str]:
    """The files of shared libraries in this process whose path holds `part`; empty where that cannot be known."""
    if not LINUX:
        return []
    lines = _read("/proc/self/maps").decode(errors="replace").splitlines()
    return sorted({line.split()[-1] for line in lines if part in line})


def _read(path: str) -> bytes:
    """A file of the kernel; empty if there is none, or if it is another user's."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


# -- memory that processes share -------------------------------------------------------------------------------------


def memory_namespace() -> int | None:
    """The same number in all processes that can open each other's descriptors; None where no process can."""
    if not LINUX:
        return None
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def memory_seals() -> int:
    """Seals that fix the size of memory: a process that touches memory which another has cut off is killed."""
    import fcntl

    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if LINUX else 0


def make_memory_file(name: str, size: int) -> int:
    """A file of sealed memory without a place in any folder. `name` is shown in /proc only.

    Raises:
        OSError: The system gives no memory, no descriptor, or has no such files.
    """
    if not LINUX:
        raise OSError("this system has no memory files")
    import fcntl

    # By `map`, in one step: after a call of its own, a signal handler that raises would lose the descriptor.
    [fd] = map(os.memfd_create, (name,), (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,))
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, memory_seals())
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, size: int) -> None:
    """Makes a file so long, and its room its own: a process that writes where there is none left is killed.

    Raises:
        OSError: There is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.pwrite(fd, bytes(size), 0)


def is_sealed(fd: int) -> bool:
    """True if a file is memory that nobody can cut off. Files on a disk have no seals."""
    import fcntl

    try:
        return LINUX and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & memory_seals() == memory_seals()
    except OSError:
        return False


def open_descriptor_of(pid: int, number: int, check: Callable[[os.stat_result], object]) -> int:
    """Opens what another process of this user has open, once `check` was happy with its `os.stat_result`.

    Raises:
        OSError: It cannot be opened, or the system has no such way.
    """
    if not LINUX:
        raise OSError("this system has no way to another process's descriptors")
    opened: list[int] = []
    try:
        # O_PATH looks at the file without opening it: opening a device or a pipe could have effects, or wait.
        opened += map(os.open, (f"/proc/{pid}/fd/{number}",), (os.O_PATH | os.O_CLOEXEC,))  # as in `make_memory_file`
        check(os.fstat(opened[0]))
        opened += map(os.open, (f"/proc/self/fd/{opened[0]}",), (os.O_RDWR | os.O_CLOEXEC,))
        [_] = map(os.close, opened[:1])
        del opened[0]
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    return opened[0]


# -- descriptors and sockets -----------------------------------------------------------------------------------------


def wake_pipe() -> tuple[int, int]:
    """Two descriptors, non-blocking: eight bytes to the second make the first readable. They may be the same."""
    if LINUX:
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing


def hung_up() -> int:
    """The event of `poll` for a connection that the other side has closed, even if there is something left to read.

    Elsewhere a connection counts once both sides have closed it; until then the directory says who is lost.
    """
    import select

    return select.POLLRDHUP if LINUX else select.POLLHUP


def keepalive_options(seconds: float) -> list[tuple[int, int, int]]:
    """Arguments for `setsockopt` that end a connection whose other machine has answered nothing for so long."""
    import socket

    tcp, third = socket.IPPROTO_TCP, max(1, int(seconds / 3))
    found = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if LINUX:
        found += [(tcp, socket.TCP_USER_TIMEOUT, int(seconds * 1000)), (tcp, socket.TCP_KEEPIDLE, third)]
    elif hasattr(socket, "TCP_KEEPALIVE"):  # macOS's name for it
        found.append((tcp, socket.TCP_KEEPALIVE, third))
    if hasattr(socket, "TCP_KEEPINTVL"):
        found += [(tcp, socket.TCP_KEEPINTVL, third), (tcp, socket.TCP_KEEPCNT, 3)]
    return found


def link_numbers(connection: socket.socket) -> tuple[int, int, int, int, int, int, int, int] | None:
    """The numbers of a `transports.stream.LinkState`, as the kernel has measured them; None where it does not tell."""
    if not LINUX:
        return None
    import socket
    import struct

    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return None
    if len(data) < 184:  # an older kernel
        return None
    (round_trip,), (again,) = struct.unpack_from("=I", data, 68), struct.unpack_from("=I", data, 100)
    sent, received = struct.unpack_from("=QQ", data, 120)
    busy, held = struct.unpack_from("=QQ", data, 168)
    (segments,), (longest,) = struct.unpack_from("=I", data, 156), struct.unpack_from("=I", data, 16)
    return sent, received, busy, held, round_trip, again, segments, longest


def undelivered(connection: socket.socket) -> tuple[int, int] | None:
    """Bytes of a connection that are not sent yet, and those that the other side has not acknowledged, with the former.

    The end of the own direction counts as one byte. None where the kernel does not tell.
    """
    if not LINUX:
        return None
    import fcntl

    def count(request: int) -> int:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), request, bytes(4)), sys.byteorder)

    try:
        return count(_SIOCOUTQNSD), count(_SIOCOUTQ)
    except (OSError, ValueError):
        return None


def hold_port() -> bool:
    """Whether a socket that is bound but does not listen keeps its port from others, and yet lets one listen there.

    Elsewhere it would keep everybody away, so the port is given back before it is used.
    """
    return LINUX


def interface_addresses() -> list[tuple[str, int, str]]:
    """Every interface of this host with its flags, once for each address: as text, link-local IPv6 with `%name`.

    The address is empty where it is of another family than IPv4 and IPv6.
    """
    import ctypes
    import socket

    class _Entry(ctypes.Structure):
        pass

    # The fields behind these are not the same everywhere, and are not needed.
    _Entry._fields_ = [
        ("next", ctypes.POINTER(_Entry)),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]
    library = ctypes.CDLL(None)
    head = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(head)) != 0:
        return []
    found = []
    try:
        entry = head
        while bool(entry):  # False for a null pointer
            name, flags, address = entry.contents.name.decode(), entry.contents.flags, entry.contents.address
            entry = entry.contents.next
            start = ctypes.string_at(address, 2) if address else b"\0\0"
            # BSD has the length in the first byte, and the family in the second.
            family = start[1] if sys.platform == "darwin" else int.from_bytes(start, sys.byteorder)
            if family == socket.AF_INET:
                found.append((name, flags, socket.inet_ntop(family, ctypes.string_at(address + 4, 4))))
            elif family == socket.AF_INET6:
                raw = ctypes.string_at(address + 8, 16)
                local = raw[0] == 0xFE and raw[1] & 0xC0 == 0x80
                if local:
                    raw = raw[:2] + b"\0\0" + raw[4:]  # BSD keeps the interface's number there
                text = socket.inet_ntop(family, raw)
                found.append((name, flags, f"{text}%{name}" if local else text))
            else:
                found.append((name, flags, ""))
    finally:
        library.freeifaddrs(head)
    return found
