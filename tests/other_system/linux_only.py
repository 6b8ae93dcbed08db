"""What only Linux has of Python's own modules: what the stubs of mypy know for it, and do not know for macOS.

Left out is what nobody could want here by accident (CAN, TIPC, the sizes of huge pages). `sitecustomize` takes all of
it away, and `tests/test_layers.py` refuses it outside `phalanx.operating_system`.
"""

from __future__ import annotations

MODULES = {
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_GETPIPE_SZ F_GETSIG F_NOTIFY F_SEAL_GROW F_SEAL_SEAL F_SEAL_SHRINK "
    "F_SEAL_WRITE F_SETPIPE_SZ F_SETSIG",
    "mmap": "MADV_DONTFORK MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_REMOVE MAP_POPULATE MAP_STACK",
    "os": "EFD_CLOEXEC EFD_NONBLOCK MFD_ALLOW_SEALING MFD_CLOEXEC MFD_HUGETLB O_DIRECT O_NOATIME O_PATH O_TMPFILE "
    "P_PIDFD RTLD_DEEPBIND SCHED_BATCH SCHED_IDLE copy_file_range eventfd eventfd_read eventfd_write "
    "fdatasync getrandom getresgid getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise "
    "posix_fallocate removexattr sched_getaffinity sched_getparam sched_getscheduler sched_setaffinity "
    "sched_setparam sched_setscheduler setresgid setresuid setxattr splice waitid",
    "resource": "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING RUSAGE_THREAD prlimit",
    "select": "EPOLLERR EPOLLET EPOLLEXCLUSIVE EPOLLHUP EPOLLIN EPOLLONESHOT EPOLLOUT EPOLLPRI EPOLLRDHUP "
    "EPOLL_CLOEXEC POLLRDHUP epoll",
    "selectors": "EpollSelector",
    "signal": "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    "socket": "AF_NETLINK AF_PACKET AF_VSOCK IP_BIND_ADDRESS_NO_PORT MSG_CMSG_CLOEXEC MSG_ERRQUEUE MSG_FASTOPEN "
    "MSG_MORE SCM_CREDENTIALS SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_DOMAIN SO_INCOMING_CPU SO_MARK "
    "SO_PASSCRED SO_PEERCRED SO_PRIORITY SO_PROTOCOL TCP_CORK TCP_DEFER_ACCEPT TCP_INFO TCP_KEEPIDLE "
    "TCP_QUICKACK TCP_USER_TIMEOUT",
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
}
"""The names of each module, with blanks between."""

FUNCTIONS = "futex pidfd_getfd prctl process_vm_readv process_vm_writev syscall"
"""Functions of the C library that `ctypes` would find."""

FOLDERS = ("/proc", "/sys/", "/dev/shm")
