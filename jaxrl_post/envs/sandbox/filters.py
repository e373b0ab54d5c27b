"""A seccomp filter that denies system calls to programs in the sandbox.

The filter is a program for the kernel's classic BPF machine, assembled here and
installed by `inside.py`. It refuses what has let programs out of sandboxes before
(mounts, namespaces, ptrace, bpf, io_uring, keyrings), what reaches the network, and
memory that no limit counts (memfd, System V shared memory, larger buffers of sockets
and pipes, watches of files). A call that is newer than this list does not exist
(ENOSYS), so that a new kernel opens no new way. docs/decisions/0023 has a table of what
the kernel keeps for a program, and what bounds it.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

__all__ = ["Architecture", "architecture", "seccomp_filter"]

# Numbers of x86_64 and aarch64; None where an architecture lacks the call. From the
# kernel's arch/x86/entry/syscalls/syscall_64.tbl and scripts/syscall.tbl.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # The machine.
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    # Parts of the kernel with a history of escapes.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "vmsplice": (278, 75),
    # `inside.py` has made its own before the filter; rules take memory of the kernel.
    "landlock_create_ruleset": (444, 444),
    # Memory that belongs to no process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "io_setup": (206, 0),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # The network, and sockets of other programs.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # A pair needs none of the options, and two of them make its buffers larger.
    "setsockopt": (54, 208),
}
# Where no mount protects the files of the machine: Landlock does not ask for these.
_WITHOUT_EFFECT: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
# Where no process namespace holds the processes together: one group is killed at once.
_GROUPS = {"setsid": (112, 157), "setpgid": (109, 154)}
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_TRUNCATE = {"truncate": (76, 45)}
_CLONE, _CLONE3, _IOCTL, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (53, 199)
_FCNTL, _PRCTL = (72, 25), (157, 167)
# The last call that this list knows: set_mempolicy_home_node, of Linux 5.17.
_LAST = 450
# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACES = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000
_NAMESPACES |= 0x10000000 | 0x20000000 | 0x40000000
# TIOCSTI writes into the input of a terminal, TIOCLINUX pastes into a console.
_TERMINAL = (0x5412, 0x541C)

# Kinds of sockets; the other bits of the argument are flags.
_UNIX, _SOCKET_KINDS, _STREAM = 1, 0xF, 1
# The operations of fcntl and prctl that are looked at, from the kernel's uapi headers.
_SET_PIPE_SIZE, _SET_DUMPABLE = 1031, 4

_LOAD, _EQUAL, _GREATER, _AND_SET, _RETURN, _AND = 0x20, 0x15, 0x25, 0x45, 0x06, 0x54
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


@dataclass(frozen=True)
class Architecture:
    """A processor's names: its place in the tables, and the kernel's number for it."""

    column: int
    audit: int


_ARCHITECTURES = {
    "x86_64": Architecture(0, 0xC000003E),
    "aarch64": Architecture(1, 0xC00000B7),
}


def architecture(machine: str) -> Architecture | None:
    """The architecture that `platform.machine()` names; None if it is not known here.

    >>> architecture("x86_64").column, architecture("riscv64")
    (0, None)
    """
    return _ARCHITECTURES.get(machine)


def seccomp_filter(known: Architecture, *, landlock: int | None, alone: bool) -> bytes:
    """Assembles the filter.

    Args:
        known: the architecture.
        landlock: version of Landlock that must protect files and processes, or None if
            namespaces do.
        alone: whether signals reach no processes but the place's own.

    Returns:
        Instructions of 8 bytes: uint16 code, uint8 jump if true, uint8 jump if false,
        uint32 value.

    >>> len(seccomp_filter(architecture("x86_64"), landlock=None,
    ...     alone=True)) % 8
    0
    """
    refused = dict(_REFUSED)
    silent: dict[str, tuple[int | None, int | None]] = {}
    if landlock is not None:
        silent = _WITHOUT_EFFECT | _GROUPS
        if landlock < 3:  # Landlock's old versions do not check truncation.
            refused |= _TRUNCATE
    if not alone:
        refused |= _SIGNALS
    column, denied = known.column, _error(errno.EPERM)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, known.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # Includes the x32 calls of x86_64, which have bit 30 set.
        (_GREATER, 0, 1, _LAST),
        _error(errno.ENOSYS),
        # Its flags lie in memory, where a filter cannot look: programs use clone then.
        *_case(_CLONE3[column], _error(errno.ENOSYS)),
    ]
    for calls, answer in ((refused, denied), (silent, _error(0))):
        for numbers in calls.values():
            number = numbers[column]
            if number is not None:
                code += _case(number, answer)
    allowed = (_RETURN, 0, 0, _ALLOW)
    code += _case(
        _CLONE[column],
        (_LOAD, 0, 0, _FIRST),
        (_AND_SET, 0, 1, _NAMESPACES),
        denied,
        allowed,
    )
    code += _case(
        _SOCKETPAIR[column],
        (_LOAD, 0, 0, _FIRST),
        (_EQUAL, 0, 3, _UNIX),
        (_LOAD, 0, 0, _SECOND),
        (_AND, 0, 0, _SOCKET_KINDS),
        # A pair of datagram sockets would reach any other by its name.
        (_EQUAL, 1, 0, _STREAM),
        denied,
        allowed,
    )
    code += _case(
        _IOCTL[column],
        (_LOAD, 0, 0, _SECOND),
        (_EQUAL, 1, 0, _TERMINAL[0]),
        (_EQUAL, 0, 1, _TERMINAL[1]),
        denied,
        allowed,
    )
    code += _case(
        _FCNTL[column],
        (_LOAD, 0, 0, _SECOND),
        (_EQUAL, 0, 1, _SET_PIPE_SIZE),
        denied,
        allowed,
    )
    # A process that is not dumpable hides its descriptors from `keeper.py`.
    code += _case(
        _PRCTL[column],
        (_LOAD, 0, 0, _FIRST),
        (_EQUAL, 0, 3, _SET_DUMPABLE),
        (_LOAD, 0, 0, _SECOND),
        (_EQUAL, 1, 0, 1),
        denied,
        allowed,
    )
    code.append(allowed)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


type _Instruction = tuple[int, int, int, int]


def _error(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


def _case(number: int, *body: _Instruction) -> list[_Instruction]:
    """Filters one system call; every path through the body ends in a return."""
    return [(_EQUAL, 0, len(body), number), *body]
