"""The program of a sandboxed run: it builds the sandbox, starts the command in it, watches it, and reports.

`sandbox.py` starts it (`COMMAND` there), writes a job to its stdin and reads a report from its stdout, both by
`marshal`. It runs outside of the sandbox and does nothing that the command says; no more than `output` bytes of what
the command writes pass through it. Three processes:

    L, this program     outside: feeds stdin, collects output, watches the limits, ends everything
    I, its child        the first process inside: builds what is visible there, starts P and waits for it. In a process
                        namespace it is process 1, and everything inside ends with it
    P, its child        gives up all rights and becomes the command

L ends when its parent does (the pipe that it reports to has no reader any more), and I when L does. What the kernel is
asked for goes through ctypes, because Python 3.11 has none of it. Imports the standard library only, and little of it:
it starts for each run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import marshal
import os
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # as typing's, whose import takes a tenth of a run
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

try:
    import resource
except ImportError:  # not a POSIX system; `sandbox.level` says so
    resource = None  # type: ignore[assignment]

TICK = 0.02
"""Seconds between two looks at memory, processes and files."""
INSIDE_ID = 1000
"""User and group of the command in its own user namespace."""
DYNAMIC_IDS = range(61184, 65520)
"""Users that exist while they are used only (systemd has set this range aside for that). A run that root starts gets
one of its own, so that its rights and its number of processes are not root's."""
HOME = "/tmp/home"
"""Where the command starts in a file system of its own."""

LINUX = sys.platform == "linux"
ARCHITECTURE = os.uname().machine if hasattr(os, "uname") else ""
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32", "usr")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs", "/nix/store")
DEVICES = ("null", "zero", "full", "random", "urandom")
OPENED, CHILD = b'"child-pid":', b'"exit-code":'
"""What bubblewrap reports of its child, and of the end of what it has run."""

_libc: Any = None


class SetupError(Exception):
    """The sandbox cannot be built here."""


def libc() -> Any:
    global _libc
    if _libc is None:
        # PyDLL keeps the interpreter lock: `clone` returns twice, and its child has no other thread to take it from.
        _libc = ctypes.PyDLL(None, use_errno=True)
    return _libc


def call(what: str, result: int) -> int:
    """What the kernel answered. Raises SetupError."""
    if result < 0:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def syscall(what: str, number: int, *args: Any) -> int:
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return call(what, libc().syscall(ctypes.c_long(number), *wide))


def prctl(what: str, option: int, *args: int) -> int:
    return call(what, libc().prctl(option, *(ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4])))


PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 28, 36, 38
NO_RIGHTS_OF_ROOT = 0b1111
"""SECBIT_NOROOT and SECBIT_NO_SETUID_FIXUP, locked: user 0 is a user like any other."""

FOR_ANOTHER_USER = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID and CAP_SETUID."""

# ------------------------------------------------------------------------------------ namespaces


def direct(job: dict[str, Any]) -> bool:
    """Whether this program makes the namespaces itself. Where it may not, bubblewrap perhaps may."""
    return job["level"] == "namespaces" and not job["bubblewrap"]


CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
OWN = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
CLONE = {"x86_64": 56, "aarch64": 220}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = libc().mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    call(f"mount {target or source}", result)


def bind(path: str, base: str) -> None:
    """`path` with everything that is mounted below it, read-only, in the new root."""
    target = base + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(path, target, None, MS_BIND | MS_REC)
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0))
    target_c = ctypes.c_char_p(os.fsencode(target))
    syscall(f"mount_setattr {path}", MOUNT_SETATTR, AT_FDCWD, target_c, AT_RECURSIVE, attributes, 32)


def new_root(job: dict[str, Any], base: str) -> None:
    """A file system with the system's programs, Python, and one writable folder of limited size, mounted at /tmp."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,nr_inodes=4k,mode=755")
    for name in SYSTEM_FOLDERS:
        path = f"/{name}"
        if os.path.islink(path):
            os.symlink(os.readlink(path), base + path)
        elif os.path.isdir(path):
            bind(path, base)
    limits = job["limits"]
    os.mkdir(f"{base}/tmp")
    # One inode each for the three folders made here, and those on the way to what is readable below /tmp.
    inodes = limits["files"] + 3 + sum(path.count("/") for path in job["readable"] if path.startswith("/tmp/"))
    size = f"size={limits['disk']},nr_inodes={inodes},mode=700,uid={INSIDE_ID},gid={INSIDE_ID}"
    mount("tmpfs", f"{base}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.makedirs(f"{base}/etc")
    for path in (*filter(os.path.exists, SYSTEM_FILES), *job["readable"]):
        bind(path, base)
    for name in ("passwd", "group"):
        with open(f"{base}/etc/{name}", "w") as file:
            file.write(f"sandbox:x:{INSIDE_ID}:" + (f"{INSIDE_ID}::{HOME}:/bin/sh\n" if name == "passwd" else "\n"))
    os.makedirs(f"{base}/dev")
    for name in DEVICES:
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT, 0o644))
        mount(f"/dev/{name}", f"{base}/dev/{name}", None, MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{base}/dev/{name}")
    os.symlink("/proc/self/fd", f"{base}/dev/fd")
    os.makedirs(f"{base}/proc")
    with contextlib.suppress(SetupError):  # refused inside of many containers; without /proc a sandbox shows less
        mount("proc", f"{base}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    os.makedirs(f"{base}/dev/shm")
    for folder in (HOME, "/tmp/.shm"):
        os.mkdir(base + folder)
        os.chown(base + folder, INSIDE_ID, INSIDE_ID)
    mount(f"{base}/tmp/.shm", f"{base}/dev/shm", None, MS_BIND)  # what is shared counts as files do
    os.chdir(base)
    syscall("pivot_root", PIVOT_ROOT[ARCHITECTURE], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    call("umount", libc().umount2(b".", MNT_DETACH))
    os.chdir("/")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None


def dynamic_id() -> int:
    return DYNAMIC_IDS[os.getpid() % len(DYNAMIC_IDS)]


def users_are_mapped() -> bool:
    """Whether the users that runs of root get exist here. In a user namespace (containers without root, `unshare -r`)
    root may be the only one, and no process may leave its groups then."""
    first, last = DYNAMIC_IDS[0], DYNAMIC_IDS[-1]
    try:
        for kind in ("uid", "gid"):
            with open(f"/proc/self/{kind}_map") as file:
                ranges = [(int(start), int(count)) for start, _, count in map(str.split, file)]
            if not any(start <= first and last < start + count for start, count in ranges):
                return False
        with open("/proc/self/setgroups") as file:
            return file.read().strip() != "deny"
    except OSError:  # a kernel without user namespaces
        return True


def map_users(process: int | str, outside: tuple[int, int], *, root: bool) -> None:
    """Whom the namespace's users are outside: the one that started the run, or for root one of its own. `outside` are
    user and group there: a process of the namespace sees itself as nobody (65534) until they are mapped."""
    for kind, own in zip(("uid", "gid"), outside, strict=True):
        if kind == "gid" and not root:
            write(f"/proc/{process}/setgroups", "deny")
        lines = f"0 0 1\n{INSIDE_ID} {dynamic_id()} 1\n" if root else f"{INSIDE_ID} {own} 1\n"
        write(f"/proc/{process}/{kind}_map", lines)


# ------------------------------------------------------------------------------------ filters

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Version → how many rights over files it knows (they are bits)."""
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14


def landlock_version() -> int:
    """0 where the kernel has none."""
    return max(0, libc().syscall(ctypes.c_long(LANDLOCK_CREATE), None, ctypes.c_long(0), ctypes.c_long(1)))


def landlock(readable: list[str], writable: str) -> None:
    """From now on only these paths can be opened, no TCP port, and (version 6) nothing outside can be signalled."""
    version = landlock_version()
    if not version:
        raise SetupError("this kernel has no Landlock")
    known = (1 << LANDLOCK_RIGHTS[max(v for v in LANDLOCK_RIGHTS if v <= version)]) - 1
    attributes = struct.pack("QQQ", known, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = syscall("landlock_create_ruleset", LANDLOCK_CREATE, attributes, len(attributes), 0)
    read = EXECUTE | READ_FILE | READ_FOLDER
    allowed = dict.fromkeys(readable, read)
    allowed.update({f"/dev/{name}": WRITE_FILE | READ_FILE for name in DEVICES})
    allowed[writable] = known & ~(1 << 6 | 1 << 11)  # no devices
    for path, rights in allowed.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # what is not there cannot be read
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & known, opened))
        syscall(f"landlock_add_rule {path}", LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(opened)
    syscall("landlock_restrict_self", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


# Calls that no answer needs and that reach beyond a process: sockets, other processes' memory, memory that no limit
# counts, mounts and namespaces, and parts of the kernel that are large and rarely used. x86-64, then aarch64.
DENIED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116),
    "lookup_dcookie": (212, 18), "move_pages": (279, 239), "migrate_pages": (256, 238), "ioprio_set": (251, 30),
}  # fmt: skip
DENIED_OUTSIDE = {
    "setxattrat": (463, 463), "removexattrat": (466, 466),
    "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "truncate": (76, 45), "pidfd_send_signal": (424, 424), "setpriority": (141, 140),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "fchmod": (91, 52), "fchown": (93, 55),
    "fsetxattr": (190, 7), "fremovexattr": (199, 16), "file_setattr": (469, 469), "inotify_add_watch": (254, 27),
    "shmat": (30, 196), "shmctl": (31, 195), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
}  # fmt: skip
"""Without a file system and processes of its own: these change files by path, or what else than their content is open
for reading, neither of which Landlock looks at; tell what happens in folders; or touch other processes of the user, and
the memory, semaphores and queues that these share by number."""
OWN_ONLY = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
            "sched_setparam": (142, 118), "sched_setattr": (314, 274)}  # fmt: skip
"""Their first argument is a process: only 0, the caller, is allowed."""
SIGNALS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
CLONE_CALLS = {"clone": (56, 220)}
SOCKET_PAIRS = {"socketpair": (53, 199)}
STREAM, SEQUENCED, SOCKET_TYPES = 1, 5, 0xF
"""A pair of streams is connected for good. A datagram socket of a pair can still send to any other by its name."""
DEVICE_CONTROLS = {"ioctl": (16, 29)}
OF_FILE_SYSTEMS, CONTROL_KINDS = (ord("f") << 8, ord("X") << 8), 0xFF00
"""Flags of files, which their owner may change with what is open for reading."""
CLONE3 = 435
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, MASK, JUMP_EQUAL, JUMP_ANY_BIT, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT, SECOND_ARGUMENT_AT = 0, 4, 16, 24


def numbers(calls: Mapping[str, tuple[int | None, int | None]]) -> list[int]:
    column = ("x86_64", "aarch64").index(ARCHITECTURE)
    return [pair[column] for pair in calls.values() if pair[column] is not None]  # type: ignore[misc]


def filter_program(*, own_files: bool, only_signal: int | None) -> bytes:
    """A seccomp program: what is denied fails with EPERM. `only_signal` is the one process that may be signalled."""
    lines: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCHITECTURES[ARCHITECTURE]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if ARCHITECTURE == "x86_64":
        lines += [(JUMP_AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, DENY | errno.EPERM)]  # the x32 calls
    denied = numbers(DENIED) + ([] if own_files else numbers(DENIED_OUTSIDE))
    for number in denied:
        lines += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, DENY | errno.EPERM)]
    # glibc falls back to clone, whose flags can be read here.
    lines += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, DENY | errno.ENOSYS)]
    for number in numbers(CLONE_CALLS):
        lines += [
            (JUMP_EQUAL, 0, 4, number),
            (LOAD, 0, 0, FIRST_ARGUMENT_AT),
            (JUMP_ANY_BIT, 0, 1, OWN),
            (RETURN, 0, 0, DENY | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        ]
    for number in numbers(OWN_ONLY):
        lines += [
            (JUMP_EQUAL, 0, 4, number),
            (LOAD, 0, 0, FIRST_ARGUMENT_AT),
            (JUMP_EQUAL, 1, 0, 0),
            (RETURN, 0, 0, DENY | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        ]
    for number in numbers(SOCKET_PAIRS):
        lines += [
            (JUMP_EQUAL, 0, 6, number),
            (LOAD, 0, 0, SECOND_ARGUMENT_AT),
            (MASK, 0, 0, SOCKET_TYPES),
            (JUMP_EQUAL, 2, 0, STREAM),
            (JUMP_EQUAL, 1, 0, SEQUENCED),
            (RETURN, 0, 0, DENY | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        ]
    for number in [] if own_files else numbers(DEVICE_CONTROLS):
        lines += [
            (JUMP_EQUAL, 0, 6, number),
            (LOAD, 0, 0, SECOND_ARGUMENT_AT),
            (MASK, 0, 0, CONTROL_KINDS),
            (JUMP_EQUAL, 1, 0, OF_FILE_SYSTEMS[0]),
            (JUMP_EQUAL, 0, 1, OF_FILE_SYSTEMS[1]),
            (RETURN, 0, 0, DENY | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        ]
    if only_signal is not None:
        for number in numbers(SIGNALS):
            lines += [
                (JUMP_EQUAL, 0, 4, number),
                (LOAD, 0, 0, FIRST_ARGUMENT_AT),
                (JUMP_EQUAL, 1, 0, only_signal),
                (RETURN, 0, 0, DENY | errno.EPERM),
                (RETURN, 0, 0, ALLOW),
            ]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def install_filter(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("H6xQ", len(program) // 8, ctypes.addressof(buffer)))
    call("seccomp", libc().prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0)))


# ------------------------------------------------------------------------------------ P: the command


def open_to_all(path: str) -> bool:
    """Whether a user with no rights of its own can get to it and read it."""
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & stat.S_IROTH:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True


def can_change_users() -> bool:
    """Whether we, root, may give a run a user of its own, and end it then. In some containers root may not."""
    if not LINUX:
        return True
    with open("/proc/self/status") as file:
        found = next((line for line in file if line.startswith("CapEff:")), "CapEff: 0")
    return int(found.split()[1], 16) & FOR_ANOTHER_USER == FOR_ANOTHER_USER and users_are_mapped()


def give_up_root(*, user: int | None) -> None:
    """No capability is left, and none comes back by executing something. `user`: become that one."""
    if LINUX and os.getuid() == 0:
        number = 0
        while libc().prctl(PR_CAPBSET_DROP, *(ctypes.c_ulong(n) for n in (number, 0, 0, 0))) == 0:
            number += 1
        if user is None:
            libc().prctl(PR_SET_SECUREBITS, *(ctypes.c_ulong(n) for n in (NO_RIGHTS_OF_ROOT, 0, 0, 0)))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if LINUX and user is None:
        header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
        call("capset", libc().capset(header, ctypes.create_string_buffer(24)))


def limit_resources(limits: dict[str, Any], *, processes: int | None) -> None:
    """The soft limits are the hard ones, so none can be raised."""
    wanted = {
        "RLIMIT_AS": limits["memory"],
        "RLIMIT_CPU": int(limits["seconds"]) + 1,
        "RLIMIT_FSIZE": limits["file_size"],
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NICE": 0,
        "RLIMIT_RTPRIO": 0,
    }
    if processes is not None:
        wanted["RLIMIT_NPROC"] = processes
    for name, value in wanted.items():
        number = getattr(resource, name, None)
        if number is None:
            continue
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except (ValueError, OSError):
            if LINUX:
                raise
            # macOS has names for limits that it does not let be set


def tasks_of_user(more: int) -> int | None:
    """`more` than this user has now; None where that cannot be known."""
    if not LINUX:
        return None
    number = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                number += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return number + more + 3


def bubblewrap_command(job: dict[str, Any], folder: str, pipes: tuple[int, int]) -> list[str]:
    """The same sandbox in bubblewrap's words. Its tmpfs has no limit on the number of files, so ours is on a disk."""
    command = [job["bubblewrap"], "--unshare-all", "--die-with-parent", "--uid", str(INSIDE_ID)]
    command += ["--gid", str(INSIDE_ID), "--hostname", "sandbox", "--cap-drop", "ALL", "--bind", folder, "/tmp"]
    for name in SYSTEM_FOLDERS:
        path = f"/{name}"
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    for path in (*filter(os.path.exists, SYSTEM_FILES), *job["readable"]):
        command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{folder}/.shm", "/dev/shm"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]
    read, write_end = os.pipe()
    os.write(write_end, filter_program(own_files=True, only_signal=None))
    os.close(write_end)
    for opened in (read, *pipes):
        os.set_inheritable(opened, True)
    command += ["--seccomp", str(read), "--json-status-fd", str(pipes[0]), "--block-fd", str(pipes[1])]
    return [*command, "--", *job["command"]]


def let_bubblewrap_go(job: dict[str, Any], status: int, block: int) -> bytes:
    """Its process 1 waits until it may have no more children than `processes`. What it has reported."""
    reported = b""
    while OPENED not in reported or b"}" not in reported:
        part = os.read(status, 4096)
        if not part:
            return reported
        reported += part
    first = int(reported.split(OPENED)[1].split(b",")[0].split(b"}")[0])
    most = job["limits"]["processes"] + 3
    resource.prlimit(first, resource.RLIMIT_NPROC, (most, most))
    os.write(block, b"!")
    return reported


def become_command(job: dict[str, Any], folder: str, stdio: tuple[int, int, int], pipes: tuple[int, int]) -> None:
    """In P. Does not return."""
    level, limits = job["level"], job["limits"]
    bubblewrap = job["bubblewrap"] if level == "namespaces" else None
    os.setsid()
    for number, opened in enumerate(stdio):
        os.dup2(opened, number)
    os.chdir(folder)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o077)
    executable = job["command"][0]
    if direct(job):
        # The user namespace counts its own processes: I, P, and those that P starts; one more is seen by the watch.
        user = INSIDE_ID if os.getuid() == 0 else None
        processes: int | None = limits["processes"] + 3
    else:
        needed = (executable, os.path.dirname(folder), *job["more_readable"])
        separate = os.getuid() == 0 and can_change_users() and all(map(open_to_all, needed))
        user = dynamic_id() if separate else None
        if bubblewrap and os.getuid() == 0:
            raise SetupError("bubblewrap is for ordinary users: root's processes cannot be counted in it")
        if bubblewrap:
            processes = None  # I limits them when there is a user namespace that counts them
        elif separate:
            processes = limits["processes"] + 3
        else:  # an ordinary user's are counted on the whole machine, and root's are not limited at all
            processes = None if os.getuid() == 0 else tasks_of_user(limits["processes"])
        if user is not None:
            for path, _, names in os.walk(folder):
                for name in ("", *names):
                    os.chown(os.path.join(path, name), user, user)
    limit_resources(limits, processes=processes)
    if level == "filters":
        prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)
        landlock([*(f"/{name}" for name in SYSTEM_FOLDERS), *SYSTEM_FILES, *job["readable"]], folder)
    give_up_root(user=user)
    if bubblewrap:
        os.execve(bubblewrap, bubblewrap_command(job, folder, pipes), job["environment"])
    if LINUX:
        prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)
    if level == "filters":
        alone = None if landlock_version() >= 6 or user is not None else os.getpid()
        install_filter(filter_program(own_files=False, only_signal=alone))
    elif level == "namespaces":
        install_filter(filter_program(own_files=True, only_signal=None))
    os.execve(executable, job["command"], job["environment"])


# ------------------------------------------------------------------------------------ I: the first process inside


def write_files(folder: str, files: dict[str, bytes], *, owner: int | None) -> None:
    for name, content in files.items():
        path = os.path.join(folder, name)
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            os.makedirs(parent)
            if owner is not None:
                while parent != folder:
                    os.chown(parent, owner, owner)
                    parent = os.path.dirname(parent)
        with open(path, "wb") as file:
            file.write(content)
        if owner is not None:
            os.chown(path, owner, owner)


def inside(
    job: dict[str, Any],
    folder: str,
    stdio: tuple[int, int, int],
    go: int,
    report: int,
    outside: tuple[int, int],
) -> None:
    """In I. Does not return. Reports `error: …`, or `started PROCESS` and `ended STATUS FULL`."""
    try:
        # L's ends of the pipes are L's alone: the command sees the end of stdin, and L that of its output.
        ours = sorted((*stdio, go, report))
        for before, after in zip((2, *ours), (*ours, 1024), strict=True):
            os.closerange(before + 1, after)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        os.close(nowhere)
        os.umask(0o022)
        home, owner = folder, None
        if LINUX:
            prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
        if direct(job):
            if job["root"]:
                os.read(go, 1)  # L has written our users
                owner = INSIDE_ID
            else:
                map_users("self", outside, root=False)
        if LINUX:
            with contextlib.suppress(SetupError):
                write("/proc/self/oom_score_adj", "1000")  # the first to go when the machine has no memory left
            prctl("dumpable", PR_SET_DUMPABLE, 0)  # the command does not look into this process
        if direct(job):
            call("sethostname", libc().sethostname(b"sandbox", 7))
            new_root(job, folder)
            home = HOME
        bubblewrap = job["level"] == "namespaces" and not direct(job)
        if bubblewrap:
            os.makedirs(f"{home}/.shm")
            os.makedirs(f"{home}/home")
        write_files(f"{home}/home" if bubblewrap else home, job["files"], owner=owner)
        failed_read, failed_write = os.pipe()
        status_read, status_write = os.pipe()
        block_read, block_write = os.pipe()
        command = os.fork()
        if command == 0:
            try:
                become_command(job, home, stdio, (status_write, block_read))
            except BaseException as error:
                os.write(failed_write, explain(error))
            finally:
                os._exit(127)
        for opened in (*stdio, failed_write, status_write, block_read):
            os.close(opened)
        if failed := os.read(failed_read, 4096):
            os.write(report, b"error: " + failed + b"\n")
            os._exit(1)
        told = let_bubblewrap_go(job, status_read, block_write) if bubblewrap else b""
        os.write(report, b"started %d\n" % command)
        while True:
            ended, status = os.wait()
            if ended == command:
                break
        if bubblewrap:
            while part := os.read(status_read, 4096):
                told += part
            if CHILD not in told:
                os.write(report, b"error: bubblewrap could not run it\n")
                os._exit(1)
            code = os.waitstatus_to_exitcode(status)
            status = code - 128 if code > 128 else status  # as shells tell a signal
        full = 0
        if direct(job):
            left = os.statvfs(home)
            full = int(left.f_bavail == 0 or left.f_favail == 0)
        os.write(report, b"ended %d %d\n" % (status, full))
        os._exit(0)
    except BaseException as error:
        os.write(report, b"error: " + explain(error) + b"\n")
    finally:
        os._exit(1)


def explain(error: BaseException) -> bytes:
    text = str(error) if isinstance(error, (SetupError, OSError)) else f"{type(error).__name__}: {error}"
    return text.replace("\n", " ").encode(errors="replace")[:1000]


# ------------------------------------------------------------------------------------ L: outside


def start(job: dict[str, Any], folder: str, stdio: tuple[int, int, int], report: int) -> int:
    """The process I. Raises SetupError."""
    go_read, go_write = os.pipe()
    outside = os.getuid(), os.getgid()
    sys.stdout.flush()
    if direct(job):
        flags = OWN | signal.SIGCHLD
        first = syscall("no user namespaces here (clone)", CLONE[ARCHITECTURE], flags, 0, 0, 0, 0)
    else:
        if LINUX:
            prctl("subreaper", PR_SET_CHILD_SUBREAPER, 1)
        first = os.fork()
    if first == 0:
        inside(job, folder, stdio, go_read, report, outside)
    try:
        if direct(job) and job["root"]:
            map_users(first, outside, root=True)
            os.write(go_write, b"!")
    except SetupError:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        raise
    finally:
        os.close(go_read)
        os.close(go_write)
    return first


def children_of(process: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (OSError, ValueError):
        pass
    return found


def descendants(process: int) -> list[int]:
    found, ahead = [], [process]
    while ahead:
        children = children_of(ahead.pop())
        found += children
        ahead += children
    return found


def lists_children(process: int) -> bool:
    """Whether /proc names the children of I. Not on every kernel; and I, which nobody may look into, is not there at
    all for an ordinary user where /proc shows everybody their own processes only (`hidepid`)."""
    return os.access(f"/proc/{process}/task/{process}/children", os.R_OK)


def descendants_by_parents(process: int) -> list[int]:
    """`descendants`, found by looking at all processes that can be seen; `process` itself need not be one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(name))
    found, ahead = [], [process]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def check_proc() -> None:
    """Raises SetupError where a run could not be watched, and what it has started would stay."""
    try:
        ours = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        ours = False
    if not ours:
        raise SetupError("/proc is not there, or shows other processes than ours: nothing can be watched")


def all_of_run(job: dict[str, Any], first: int) -> set[int]:
    """All processes of the run but I, which is `first`."""
    find = descendants if lists_children(first) else descendants_by_parents
    found = set(find(first))
    if not direct(job):  # those whose parents have ended are ours now
        found.update(find(os.getpid()))
    return found - {first}


def unmapped_files(process: int) -> tuple[int, int]:
    """Number and bytes of open files that have no name any more, which no walk through the folder finds."""
    number, size = 0, 0
    try:
        for name in os.listdir(f"/proc/{process}/fd"):
            found = os.stat(f"/proc/{process}/fd/{name}")
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                number, size = number + 1, size + found.st_blocks * 512
    except OSError:
        pass
    return number, size


def proportional(process: int) -> int:
    """Memory in which each page counts once, however many processes share it."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def allow_ourselves(path: str, needed: int) -> None:
    """Let us into a folder of the run, never into what a link names that has taken its place. Raises OSError."""
    if os.access(path, needed):
        return
    if not LINUX:
        os.chmod(path, 0o700, follow_symlinks=False)
        return
    opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chmod(f"/proc/self/fd/{opened}", 0o700)
    finally:
        os.close(opened)


def remove(folder: str) -> None:
    """The folder of a run that has ended, however deep what is in it: folders are moved up before they are emptied."""
    ahead, moved, own = [folder], 0, f".{os.urandom(8).hex()}-"
    everything = os.R_OK | os.W_OK | os.X_OK
    while ahead:
        path = ahead.pop()
        with contextlib.suppress(OSError):
            allow_ourselves(path, everything)
            with os.scandir(path) as entries:
                found = list(entries)
            for entry in found:
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    allow_ourselves(entry.path, everything)
                    moved += 1
                    target = os.path.join(folder, f"{own}{moved}")
                    os.rename(entry.path, target)
                    ahead.append(target)
            if path != folder:
                os.rmdir(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


class Watch:
    """What the command and everything that it has started use, together."""

    def __init__(self, job: dict[str, Any], folder: str, first: int) -> None:
        self.job = job
        self.direct = direct(job)
        self.bubblewrap = job["level"] == "namespaces" and not self.direct
        self.limits = job["limits"]
        self.folder = folder
        self.first = first
        self.page = os.sysconf("SC_PAGE_SIZE")
        self.peak = 0
        self.own_files = len(job["files"])

    def look(self) -> str | None:
        """The limit that is passed, if one is."""
        processes = all_of_run(self.job, self.first)
        used, tasks = 0, 0
        for process in processes:
            try:
                with open(f"/proc/{process}/statm") as file:
                    used += int(file.read().split()[1]) * self.page
                tasks += len(os.listdir(f"/proc/{process}/task"))
            except (OSError, ValueError):
                pass
        if used > self.limits["memory"]:  # what they share counted more than once
            used = sum(map(proportional, processes)) or used
        self.peak = max(self.peak, used)
        if used > self.limits["memory"]:
            return "memory"
        # Besides the command itself, and bubblewrap's two processes.
        if tasks > self.limits["processes"] + 1 + 2 * self.bubblewrap:
            return "processes"
        if not self.direct:
            return self._look_at_files(processes)
        return None

    def _look_at_files(self, processes: set[int]) -> str | None:
        number, size = -2 * self.bubblewrap, 0  # its own two folders
        for process in processes:
            more_files, more_bytes = unmapped_files(process)
            number, size = number + more_files, size + more_bytes
        ahead = [self.folder]
        while ahead:
            path = ahead.pop()
            try:
                allow_ourselves(path, os.R_OK | os.X_OK)  # one may write to folders that nobody may list
                with os.scandir(path) as entries:
                    for entry in entries:
                        number += 1
                        if entry.is_dir(follow_symlinks=False):
                            ahead.append(entry.path)
                        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if number > self.limits["files"]:
                            return "disk"
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:  # nobody can look there
                    return "disk"
        return "disk" if size > self.limits["disk"] or number > self.limits["files"] else None


def end_everything(job: dict[str, Any], first: int, reported: bytearray) -> None:
    """Nothing that the run has started is left afterwards."""
    if direct(job):
        _signal(first, signal.SIGKILL)  # the kernel ends the others, and is done when `first` can be waited for
        return
    if LINUX:
        # A process that is stopped starts no other, so there is an end to this.
        stopped: set[int] = set()
        fresh = {first}
        while fresh:
            for process in fresh:
                _signal(process, signal.SIGSTOP)
            stopped |= fresh
            fresh = all_of_run(job, first) - stopped
        for process in stopped:
            _signal(process, signal.SIGKILL)
    else:
        started = bytes(reported).split()[1:2]
        with contextlib.suppress(OSError):
            os.killpg(int(started[0]) if started else first, signal.SIGKILL)
    _signal(first, signal.SIGKILL)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, number)


def reap(deadline: float) -> None:
    """Wait for all children, also for those that have come to us because their parents ended."""
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return


def supervise(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """One run, from start to end."""
    limits = job["limits"]
    if LINUX:
        check_proc()
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    report_read, report_write = os.pipe()
    first = start(job, folder, (stdin_read, stdout_write, stderr_write), report_write)
    for opened in (stdin_read, stdout_write, stderr_write, report_write):
        os.close(opened)
    for opened in (stdin_write, stdout_read, stderr_read, report_read):
        os.set_blocking(opened, False)
    output = {stdout_read: bytearray(), stderr_read: bytearray(), report_read: bytearray()}
    given = memoryview(job["stdin"])
    poll = select.poll()
    for opened in output:
        poll.register(opened, select.POLLIN)
    poll.register(stdin_write, select.POLLOUT)
    poll.register(1, 0)  # an error there: nobody reads our report, because the parent is gone
    watch = Watch(job, folder, first)
    begun = time.monotonic()
    limit: str | None = None
    next_look = begun + TICK
    feeding, ended_at = True, None
    while limit is None and ended_at is None:
        now = time.monotonic()
        if now >= begun + limits["seconds"]:
            limit = "time"
            break
        if LINUX and now >= next_look:
            limit = watch.look()
            now = time.monotonic()
            next_look = now + TICK
        if not given and feeding:
            poll.unregister(stdin_write)
            os.close(stdin_write)
            feeding = False
        wait = min(begun + limits["seconds"], next_look if LINUX else float("inf")) - now
        for opened, _ in poll.poll(max(0, int(wait * 1000) + 1)):
            if opened == 1:
                limit = "parent"
            elif opened == stdin_write:
                try:
                    given = given[os.write(stdin_write, given[:65536]) :]
                except BlockingIOError:
                    pass
                except OSError:  # nobody reads it
                    given = given[:0]
            elif not collect(opened, output[opened], most=None if opened == report_read else limits["output"]):
                poll.unregister(opened)
                if opened == report_read:
                    ended_at = time.monotonic()
            elif opened != report_read and len(output[opened]) > limits["output"]:
                limit = "output"
            elif b"ended " in output[report_read]:
                ended_at = time.monotonic()
    seconds = (ended_at or time.monotonic()) - begun
    end_everything(job, first, output[report_read])
    reap(time.monotonic() + 10)
    for opened, content in output.items():  # what is still in the pipes
        collect(opened, content, most=None if opened == report_read else limits["output"])
    if limit is None and any(len(output[opened]) > limits["output"] for opened in (stdout_read, stderr_read)):
        limit = "output"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    result = {
        "stdout": bytes(output[stdout_read][: limits["output"]]),
        "stderr": bytes(output[stderr_read][: limits["output"]]),
        "limit": limit,
        "seconds": seconds,
        "peak_memory": max(watch.peak, peak << 10 if LINUX else peak),
        "status": None,
    }
    for line in bytes(output[report_read]).decode(errors="replace").splitlines():
        if line.startswith("error: "):
            said = bytes(output[stderr_read][:1000]).decode(errors="replace").strip()
            return {"setup_error": line.removeprefix("error: ") + (f": {said}" if said else "")}
        if line.startswith("ended ") and len(words := line.split()) == 3:
            result["status"] = os.waitstatus_to_exitcode(int(words[1]))
            if limit is None and words[2] == "1" and result["status"] != 0:
                result["limit"] = "disk"
    return result


def collect(opened: int, content: bytearray, *, most: int | None) -> bool:
    """What can be read now, up to one byte more than `most`. False at the end."""
    try:
        while most is None or len(content) <= most:
            part = os.read(opened, 65536 if most is None else min(65536, most + 1 - len(content)))
            if not part:
                return False
            content += part
    except BlockingIOError:
        pass
    return True


def main() -> None:
    report = os.dup(1)
    try:
        with open(0, "rb", closefd=False) as file:  # no pipe gets its number
            job = marshal.load(file)
        job["root"] = job["root"] and LINUX and users_are_mapped()
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.umask(0o077)
        try:
            result = supervise(job, job["folder"])
        finally:
            remove(job["folder"])
        if result.get("limit") == "parent":  # nobody reads it
            os._exit(1)
    except BaseException as error:
        result = {"setup_error": explain(error).decode()}
    with open(report, "wb") as file:
        marshal.dump(result, file)


def _stop(number: int, frame: object) -> None:
    """The caller does not want the result any more. Written so that `supervise` ends as if its parent had gone."""
    read, write_end = os.pipe()
    os.close(read)
    os.dup2(write_end, 1)
