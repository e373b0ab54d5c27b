"""The filter of system calls, run here as the kernel runs it: what each call gets."""

import errno
import itertools
import struct

import pytest

from jaxrl_post.envs.sandbox import filters

ALLOWED = "allowed"
KILLED = "killed"
PERM, NOSYS = errno.EPERM, errno.ENOSYS
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Namespaces: the version of Landlock, whether signals stay in the place.
PLACES = list(itertools.product((None, 1, 2, 3, 6, 7), (True, False)))
# Numbers of x86_64 and aarch64: what asyncio, subprocess, threading, sqlite3 and
# tempfile ask for, and other ordinary programs.
NEEDED = {
    "read": (0, 63),
    "write": (1, 64),
    "mmap": (9, 222),
    "pipe2": (293, 59),
    "dup3": (292, 24),
    "openat": (257, 56),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "ftruncate": (77, 46),
    "flock": (73, 32),
    "fsync": (74, 82),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "ppoll": (271, 73),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "signalfd4": (289, 74),
    "futex": (202, 98),
    "execve": (59, 221),
    "wait4": (61, 260),
    "pidfd_open": (434, 434),
    "close_range": (436, 436),
    "sched_getaffinity": (204, 123),
    "getrandom": (318, 278),
    "clock_nanosleep": (230, 115),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "getsockname": (51, 204),
    "setitimer": (38, 103),
    "rt_sigaction": (13, 134),
}
# Calls that keep memory of the kernel that no limit counts, or reach others.
REFUSED = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "setsockopt": (54, 208),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "landlock_create_ruleset": (444, 444),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "unshare": (272, 97),
}
# Number of inotify_init, which only x86_64 has.
INOTIFY_INIT = 253


class Machine:
    """The kernel's machine for classic BPF programs, for one filter."""

    def __init__(self, name, *, landlock=None, alone=True):
        self.name = name
        self.column = list(AUDIT).index(name)
        known = filters.architecture(name)
        code = filters.seccomp_filter(known, landlock=landlock, alone=alone)
        self.code = list(struct.iter_unpack("=HBBI", code))

    def __call__(self, number, *arguments, audit=None):
        """Verdict on a call: ALLOWED, KILLED, or the number of an error."""
        arguments = (*arguments, *[0] * (6 - len(arguments)))
        audit = AUDIT[self.name] if audit is None else audit
        data = struct.pack("=IIQ6Q", number, audit, 0, *arguments)
        at, value = 0, 0
        while True:
            # The kernel refuses a program that jumps beyond its end; so does this.
            operation, if_true, if_false, constant = self.code[at]
            at += 1
            match operation:
                case 0x20:
                    (value,) = struct.unpack_from("=I", data, constant)
                case 0x54:
                    value &= constant
                case 0x15:
                    at += if_true if value == constant else if_false
                case 0x25:
                    at += if_true if value > constant else if_false
                case 0x45:
                    at += if_true if value & constant else if_false
                case 0x06:
                    action, error = constant & 0xFFFF0000, constant & 0xFFFF
                    if action == 0x50000:
                        return error
                    return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}[action]
                case _:
                    raise AssertionError(f"operation {operation:#x} at {at - 1}")


@pytest.fixture(params=AUDIT)
def name(request):
    return request.param


@pytest.fixture(params=PLACES, ids=str)
def machine(request, name):
    landlock, alone = request.param
    return Machine(name, landlock=landlock, alone=alone)


def numbers(calls, column):
    return {each[column]: call for call, each in calls.items()}


def test_every_call_gets_what_the_tables_say(machine, request):
    landlock, alone = request.node.callspec.params["machine"]
    silent, refused = {}, dict(filters._REFUSED)
    if landlock is not None:
        silent = filters._WITHOUT_EFFECT | filters._GROUPS
        if landlock < 3:
            refused |= filters._TRUNCATE
    if not alone:
        refused |= filters._SIGNALS
    expected = dict.fromkeys(range(451), ALLOWED)
    expected |= dict.fromkeys(numbers(refused, machine.column), PERM)
    expected |= dict.fromkeys(numbers(silent, machine.column), 0)
    expected |= dict.fromkeys(range(451, 600), NOSYS)
    expected |= {435: NOSYS, 0x40000000 + 39: NOSYS, 0xFFFFFFFF: NOSYS}
    # Calls whose arguments count have tests of their own.
    for looked_at in ("SOCKETPAIR", "PRCTL", "FCNTL", "IOCTL", "CLONE"):
        del expected[getattr(filters, f"_{looked_at}")[machine.column]]
    expected.pop(None, None)
    assert {number: machine(number) for number in expected} == expected


def test_ordinary_programs_have_their_calls(machine):
    wanted = numbers(NEEDED, machine.column)
    assert {call: machine(each) for each, call in wanted.items()} == dict.fromkeys(
        NEEDED, ALLOWED
    )


def test_what_no_limit_counts_is_refused(machine):
    wanted = numbers(REFUSED, machine.column)
    assert {call: machine(each) for each, call in wanted.items()} == dict.fromkeys(
        REFUSED, PERM
    )
    if machine.name == "x86_64":
        assert machine(INOTIFY_INIT) == PERM


def test_pairs_of_sockets_are_unix_streams(machine):
    number = (53, 199)[machine.column]
    for family, kind, flags in itertools.product(
        range(64), range(16), (0, 0x800, 0x80000, 0x80800)
    ):
        expected = ALLOWED if (family, kind) == (1, 1) else PERM
        assert machine(number, family, kind | flags) == expected, (family, kind, flags)


def test_clone_makes_no_namespaces(machine):
    number = (56, 220)[machine.column]
    for bit in range(32):
        namespace = bit in {7, 17, 25, 26, 27, 28, 29, 30}
        for others in (0, 17, 0x3D0F00):
            flags = others & ~0x20000 | 1 << bit
            assert machine(number, flags) == (PERM if namespace else ALLOWED), flags
    assert machine(number, 0x1200011) == ALLOWED  # As fork() of the C library.


def test_ioctl_writes_into_no_terminal(machine):
    number = (16, 29)[machine.column]
    # TCGETS, FIONBIO, FIONREAD, TIOCGWINSZ, FIOCLEX, and neighbours of the refused.
    for operation in (0x5401, 0x5421, 0x541B, 0x5413, 0x5451, 0x5411, 0x541D, 0):
        assert machine(number, 0, operation) == ALLOWED, operation
    assert machine(number, 0, 0x5412) == machine(number, 0, 0x541C) == PERM


def test_fcntl_makes_no_pipe_larger(machine):
    number = (72, 25)[machine.column]
    for operation in (*range(40), *range(1024, 1050)):
        expected = PERM if operation == 1031 else ALLOWED
        assert machine(number, 0, operation) == expected, operation


def test_prctl_hides_no_descriptors(machine):
    number = (157, 167)[machine.column]
    for operation, value in itertools.product(range(80), (0, 1, 2)):
        expected = PERM if operation == 4 and value != 1 else ALLOWED
        assert machine(number, operation, value) == expected, (operation, value)


def test_the_calls_of_another_architecture_end_the_program(machine, name):
    for audit in {*AUDIT.values(), 0x40000003, 0} - {AUDIT[name]}:
        assert machine(0, audit=audit) == KILLED
