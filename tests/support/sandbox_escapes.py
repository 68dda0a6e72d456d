"""Attempts to break out of the sandbox, each made at each level that the machine has, and what became of them.

    python sandbox_escapes.py FOLDER_OF_SANDBOX_PY

prints `{level or "bubblewrap": {attempt: "held" or what got out}}`. It runs as whoever starts it, with any Python from 3.11 on, and
imports the standard library only. An attempt that succeeds does little: bombs are bounded, the process to be killed is
our own, the network is loopback, and what is written is an empty file that is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
ESCAPED = "ESCAPED"

# Every program reads what it needs to know of the host from stdin, and says ESCAPED, and how, if it got out.
BEGIN = """
import ctypes, json, os, resource, signal, socket, struct, subprocess, sys, threading, time
host = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function):
    try:
        got = function()
    except (OSError, MemoryError, ValueError, RuntimeError, PermissionError) as error:
        print(f"{function.__name__}: {error!r}")
    else:
        if got is not None and got is not False:
            print("ESCAPED", function.__name__, repr(got)[:200])
            sys.stdout.flush()
"""


class Attempt(NamedTuple):
    code: str
    limits: dict[str, Any] = {}  # noqa: RUF012
    seen: Callable[[Any, Host], str | None] | None = None
    """What the host sees besides what the program says: the reason why it got out."""


class Host:
    """What a program could get at: a process with secrets, sockets, files, a name server."""

    def __init__(self, folder: Path) -> None:
        self.secret = secrets.token_hex(8)
        self.folder = folder
        self.marker = f"sandbox-escape-{os.getpid()}-"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        threading.Thread(target=self._answer, daemon=True).start()
        self.unix = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        self.unix_names = [f"\0{self.marker}{self.secret}", str(folder / "socket")]
        for listener, name in zip(self.unix, self.unix_names, strict=True):
            listener.bind(name)
            listener.listen()
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(folder / "datagrams"))
        self.segment = shared_segment(self.secret)
        # What a run may read: everybody gets there, or a run that root starts has no user of its own.
        folder.chmod(0o755)
        self.readable = folder / "readable"
        self.readable.mkdir(mode=0o755)
        self.readable.chmod(0o755)
        (self.readable / "file").touch()
        (self.readable / "file").chmod(0o644)
        self.outside = folder / "outside"
        self.outside.mkdir(mode=0o700)
        (self.outside / "secret").write_text(self.secret)
        self.opened = os.open(self.outside / "secret", os.O_RDONLY)
        os.set_inheritable(self.opened, True)
        self.victim = subprocess.Popen(
            [sys.executable, "-c", f"secret = {self.secret!r}; import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            env={"SECRET": self.secret},
        )

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                _, address = self.udp.recvfrom(512)
                self.udp.sendto(b"answer", address)

    def describe(self, attempt: str, home_file: str) -> dict[str, Any]:
        return {
            "secret": self.secret,
            "victim": self.victim.pid,
            "tcp": self.tcp.getsockname(),
            "udp": self.udp.getsockname(),
            "unix": self.unix_names,
            "datagrams": self.datagrams.getsockname(),
            "segment": self.segment,
            "readable": str(self.readable / "file"),
            "outside": str(self.outside),
            "home_file": home_file,
            "marker": f"{self.marker}{attempt}-",
            "python": sys.executable,
            "writable": [str(self.outside), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"), str(Path.cwd())],
        }

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for opened in (self.tcp, self.udp, *self.unix, self.datagrams):
            opened.close()
        remove_segment(self.segment)
        os.close(self.opened)


def shared_segment(secret: str) -> int:
    """The number of shared memory (System V) with `secret`, which its user's other processes find by trying."""
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    number = int(libc.shmget(0, 4096, 0o1600))
    if number >= 0:
        at = libc.shmat(number, None, 0)
        ctypes.memmove(at, secret.encode(), len(secret))
        libc.shmdt(ctypes.c_void_p(at))
    return number


def remove_segment(number: int) -> None:
    if number >= 0:
        ctypes.CDLL(None).shmctl(number, 0, None)


def left_over(result: Any, host: Host) -> str | None:
    """Processes of any attempt that are alive although none is running."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{host.marker}{result.attempt}-".encode() in command.read_bytes():
                return f"process {command.parent.name} is alive"
    return None


def ended_by(*limits: str) -> Callable[[Any, Host], str | None]:
    return lambda result, host: None if result.limit in limits else f"limit is {result.limit}, not one of {limits}"


def not_written(result: Any, host: Host) -> str | None:
    marker = f"{host.marker}{result.attempt}-"
    found = [path for folder in host.describe("", "")["writable"] for path in Path(folder).glob(f"{marker}*")]
    for path in found:
        path.unlink(missing_ok=True)
    return f"{found[0]} was written" if found else None


def _spawn(count: int, what: str) -> str:
    """A program that makes up to `count` of something, slowly enough to be stopped."""
    return f"""
def many():
    made = 0
    while made < {count}:
        {what}
        made += 1
        time.sleep(0.005)
    return made
attempt(many)
"""


BOMB = "import os, time\nfor _ in range(400): os.fork() or (time.sleep(60), os._exit(0)); time.sleep(0.005)"
FILL = "import os, time\nfor n in range(40): open(f'f{n}', 'wb').write(os.urandom(1 << 20)); time.sleep(0.05)"
SLEEPER = "[host['python'], '-I', '-S', '-c', 'import time; time.sleep(60)', host['marker']]"
QUIET = "stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"

ATTEMPTS: dict[str, Attempt] = {
    "network: loopback": Attempt("""
def connect(): return socket.create_connection(tuple(host["tcp"]), timeout=2)
attempt(connect)
"""),
    # A UDP socket that is connected sends nothing; 192.0.2.1 is nobody's address (RFC 5737).
    "network: outside": Attempt("""
def route():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect(("192.0.2.1", 9))
    return s.getsockname()
attempt(route)
def raw(): return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
attempt(raw)
def netlink(): return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
attempt(netlink)
"""),
    "network: DNS": Attempt("""
def ask():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(2)
    s.sendto(b"question", tuple(host["udp"]))
    return s.recv(100)
attempt(ask)
"""),
    "unix sockets of the host": Attempt("""
for name in host["unix"]:
    def connect():
        s = socket.socket(socket.AF_UNIX)
        s.connect(name)
        return name
    attempt(connect)
def from_a_pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return one.sendto(b"datagram", host["datagrams"])
attempt(from_a_pair)
"""),
    "fork bomb": Attempt(
        _spawn(400, "os.fork() or (time.sleep(60), os._exit(0))"),
        {"processes": 10},
        ended_by("processes", "none", "time"),
    ),
    "filling process numbers": Attempt(
        # Each is an orphan at once, in a session of its own.
        _spawn(400, "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(60), os._exit(0))"),
        {"processes": 10},
        ended_by("processes", "none", "time"),
    ),
    "threads": Attempt(
        _spawn(400, "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
        + "\nsys.stdout.flush(); os._exit(0)",
        {"processes": 10},
    ),
    "memory bomb": Attempt(
        """
def allocate():
    got = bytearray(300 << 20)
    got[:: 4096] = b"x" * len(got[:: 4096])
    return len(got)
attempt(allocate)
""",
        {"memory": 128 * MIB},
    ),
    "memory of many processes": Attempt(
        """
for child in range(5):
    if os.fork() == 0:
        if child % 2:
            got = bytearray(os.urandom(1 << 20)) * 60
        else:
            import mmap
            got = mmap.mmap(-1, 60 << 20)
            for number in range(60):
                got[number << 20 : number + 1 << 20] = os.urandom(1 << 20)
        time.sleep(60)
        os._exit(0)
time.sleep(4)
print("ESCAPED")
""",
        {"memory": 160 * MIB, "seconds": 20},
        ended_by("memory"),
    ),
    "memory that belongs to no process": Attempt(
        """
def memory_files():
    number, size = 0, 0
    while size < 200 << 20:
        opened = os.memfd_create(f"m{number}")
        size += os.write(opened, bytes(1 << 20))
        number += 1
        time.sleep(0.01)
    return size
attempt(memory_files)
def segments():
    got = libc.shmget(0, 200 << 20, 0o1600)
    if got < 0:
        raise OSError("shmget")
    libc.shmctl(got, 0, None)
    return True
attempt(segments)
""",
        {"memory": 128 * MIB},
    ),
    "filling the disk": Attempt(
        """
def fill():
    for number in range(40):
        with open(f"file{number}", "wb") as file:
            file.write(os.urandom(1 << 20))
        time.sleep(0.05)
    return number
attempt(fill)
""",
        {"disk": 8 * MIB},
        ended_by("disk", "none"),
    ),
    "filling the disk with unlinked files": Attempt(
        """
def fill():
    kept = []
    for number in range(40):
        kept.append(open(f"file{number}", "wb"))
        os.unlink(f"file{number}")
        kept[-1].write(os.urandom(1 << 20))
        kept[-1].flush()
        time.sleep(0.05)
    return number
attempt(fill)
""",
        {"disk": 8 * MIB},
    ),
    "filling the disk out of sight": Attempt(
        """
def fill(where):
    for number in range(40):
        with open(f"{where}file{number}", "wb") as file:
            file.write(os.urandom(1 << 20))
        time.sleep(0.05)
    return number
def in_a_folder_that_nobody_may_list():
    os.mkdir("unlisted", 0o300)
    return fill("unlisted/")
def in_a_folder_without_a_path():  # its path is longer than any call takes
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    return fill("")
attempt(in_a_folder_that_nobody_may_list if os.fork() else in_a_folder_without_a_path)
""",
        {"disk": 8 * MIB},
        ended_by("disk", "none"),
    ),
    "many files": Attempt(
        """
def fill():
    for number in range(800):
        os.mkdir(f"folder{number}") if number % 2 else open(f"file{number}", "w").close()
        time.sleep(0.002)
    return number
attempt(fill)
""",
        {"files": 50},
        ended_by("disk", "none"),
    ),
    "a huge file": Attempt(
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def write():
    with open("big", "wb") as file:
        for _ in range(4):
            file.write(bytes(1 << 20))
    return os.path.getsize("big")
attempt(write)
def sparse():
    os.truncate("big", 1 << 30)
    return os.path.getsize("big")
attempt(sparse)
""",
        {"file_size": MIB},
    ),
    "reading the home folder": Attempt("""
def read(): return open(host["home_file"]).read() == host["secret"]
attempt(read)
def through_a_name(): return os.path.exists(host["home_file"])
if os.environ["HOME"] == "/tmp/home": attempt(through_a_name)
"""),
    "reading files of the user": Attempt("""
def read(): return open(host["outside"] + "/secret").read()
attempt(read)
def listing(): return os.listdir(host["outside"])
attempt(listing)
"""),
    "another process's environment and memory": Attempt("""
victim = host["victim"]
def environment(): return host["secret"] in open(f"/proc/{victim}/environ").read()
attempt(environment)
def arguments(): return host["secret"] in open(f"/proc/{victim}/cmdline").read()
attempt(arguments)
def memory(): return open(f"/proc/{victim}/mem", "rb")
attempt(memory)
def ptrace():
    if libc.ptrace(16, victim, None, None) < 0:
        raise OSError(os.strerror(ctypes.get_errno()))
    libc.ptrace(17, victim, None, None)
    return True
attempt(ptrace)
def parents():
    found = open(f"/proc/{os.getppid()}/environ").read().split("\\0")
    return [entry for entry in found if entry and entry.split("=")[0] not in os.environ] or None
attempt(parents)
def shared():
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(host["segment"], None, 0o10000)
    return at not in (None, ctypes.c_void_p(-1).value) and host["secret"].encode() in ctypes.string_at(at, 100)
if host["segment"] >= 0: attempt(shared)
def removed(): return libc.shmctl(host["segment"], 0, None) == 0
if host["segment"] >= 0: attempt(removed)
"""),
    "signals to other processes": Attempt("""
def kill():
    os.kill(host["victim"], signal.SIGKILL)
    return True
attempt(kill)
def everybody():
    # -1 is everybody whom one may signal, and success means that there was somebody else than us.
    if os.getuid() == 0 or os.environ["HOME"] != "/tmp/home":
        return None
    os.kill(-1, 0)
attempt(everybody)
def parents(): 
    if os.environ["HOME"] == "/tmp/home":
        os.kill(os.getppid(), signal.SIGKILL)  # the first process inside: the kernel lets nobody inside kill it
        time.sleep(0.2)
        return None
    os.kill(os.getppid(), 0)
    return True
attempt(parents)
def priority():
    os.setpriority(os.PRIO_PROCESS, host["victim"], 19)
    return True
attempt(priority)
def limits(): return resource.prlimit(host["victim"], resource.RLIMIT_NOFILE)
attempt(limits)
"""),
    "a symlink out of the folder": Attempt("""
os.symlink(host["outside"], "link")
def read(): return open("link/secret").read()
attempt(read)
def write(): return open(f"link/{host['marker']}link", "w")
attempt(write)
os.mkdir("locked")
os.symlink(host["outside"], "locked/link")
os.mkdir("unlisted", 0o300)
os.symlink(host["outside"], "unlisted/link")
try:
    os.fchmod(os.open("locked", os.O_RDONLY), 0)  # whoever removes the folder must not follow the link
except PermissionError:
    pass
""", seen=lambda result, host: not_written(result, host) or (
        None if (host.outside / "secret").exists() and host.outside.stat().st_mode & 0o777 == 0o700
        else "what the link names was changed")),
    "writing outside of the folder": Attempt("""
for folder in host["writable"]:
    try:
        open(f"{folder}/{host['marker']}file", "w").close()
    except OSError:
        pass
def mode():
    os.chmod(host["outside"], 0o755)
    os.chmod(host["outside"], 0o700)
    return True
attempt(mode)
def times():
    os.utime(host["outside"] + "/secret")
    return True
attempt(times)
def descriptor():
    return os.open(host["readable"], os.O_RDONLY)
def mode_of_what_is_open():
    os.fchmod(descriptor(), 0o4777)
    return True
attempt(mode_of_what_is_open)
def mode_of_the_system():
    opened = os.open(os.__file__, os.O_RDONLY)
    os.fchmod(opened, os.fstat(opened).st_mode & 0o7777)
    return True
attempt(mode_of_the_system)
def attribute_of_what_is_open():
    os.setxattr(descriptor(), "user.escaped", b"")
    return True
attempt(attribute_of_what_is_open)
def flags_of_what_is_open():  # "no dump", which changes nothing else
    import fcntl
    flags = bytearray(8)
    opened = descriptor()
    fcntl.ioctl(opened, 0x80086601, flags)
    flags[0] ^= 0x40
    fcntl.ioctl(opened, 0x40086602, bytes(flags))
    return True
attempt(flags_of_what_is_open)
def watched():
    if libc.inotify_add_watch(libc.inotify_init(), host["outside"].encode(), 0xFFF) < 0:
        raise OSError("inotify_add_watch")
    return True
attempt(watched)
""", seen=not_written),
    "a process that outlives the run": Attempt(
        f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        subprocess.Popen({SLEEPER}, {QUIET}, start_new_session=True)
    os._exit(0)
os.wait()
time.sleep(0.3)
""",
        seen=left_over,
    ),
    "sleeping children": Attempt(
        f"for _ in range(4): subprocess.Popen({SLEEPER})",  # they hold stdout open
        {"seconds": 30},
        lambda result, host: left_over(result, host) or (f"took {result.seconds} s" if result.seconds > 25 else None),
    ),
    "descriptors of the parent": Attempt("""
for number in range(3, 1024):
    def read(): return os.read(number, 10)
    try:
        print("ESCAPED", number, read())
    except OSError:
        pass
"""),
    "endless output": Attempt(
        "while True: sys.stdout.write('x' * 10000); sys.stderr.write('y' * 10000)",
        {"output": 20_000, "seconds": 30},
        lambda result, host: ended_by("output")(result, host) or (
            "too much came" if max(len(result.stdout), len(result.stderr)) > 20_000 else None),
    ),
    "ignored signals and a passed deadline": Attempt(
        """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""",
        {"seconds": 1},
        ended_by("time"),
    ),
    "a set-user-ID program": Attempt("""
def new_rights():  # with "no new privileges" (39 asks) the kernel ignores the bits on every file
    return libc.prctl(39, 0, 0, 0, 0) == 0
attempt(new_rights)
def capabilities():
    status = open("/proc/self/status").read()
    found = [line for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "CapAmb"))]
    return any(int(line.split()[1], 16) for line in found)
attempt(capabilities)
"""),
    "namespaces and mounts of its own": Attempt("""
def user_namespace():
    if libc.unshare(0x10000000) < 0:
        raise OSError("unshare")
    return True
attempt(user_namespace)
def mounted():
    if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) < 0:
        raise OSError("mount")
    return True
attempt(mounted)
"""),
    "raising limits": Attempt("""
for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "MEMLOCK"):
    number = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(number)
    def raised():
        if hard == resource.RLIM_INFINITY:
            return None
        resource.setrlimit(number, (hard + 1, hard + 1))
        return resource.getrlimit(number)[1] > hard
    attempt(raised)
"""),
}  # fmt: skip


class Seen(NamedTuple):
    attempt: str
    stdout: str
    stderr: str
    limit: str
    seconds: float


def make(sandbox: Any, name: str, host: Host, home_file: str, level: Any) -> str:
    attempt = ATTEMPTS[name]
    slug = f"{level}-{name.replace(' ', '-').replace(':', '')}"
    told = json.dumps(host.describe(slug, home_file)) + "\n"
    limits = sandbox.Limits(**{"seconds": 20.0, **attempt.limits})
    found = sandbox.run_python(BEGIN + attempt.code, stdin=told, limits=limits, readable=[host.readable])
    if found.level != level:
        return f"ran at {found.level}"
    result = Seen(slug, found.stdout, found.stderr, str(found.limit or "none"), found.seconds)
    seen = attempt.seen(result, host) if attempt.seen else None  # it tidies up, too
    if ESCAPED in found.stdout:
        return next(line for line in found.stdout.splitlines() if ESCAPED in line)
    if "lost sys.stdin" in found.stderr or "SyntaxError" in found.stderr or "NameError" in found.stderr:
        return f"the attempt is broken: {found.stderr}"
    return seen or "held"


@contextlib.contextmanager
def hosts() -> Iterator[Callable[[], Host]]:
    with tempfile.TemporaryDirectory(prefix="sandbox-escapes-") as folder, contextlib.ExitStack() as stack:
        os.chmod(folder, 0o755)
        count = 0

        def new() -> Host:
            nonlocal count
            count += 1
            path = Path(folder) / str(count)
            path.mkdir()
            host = Host(path)
            stack.callback(host.close)
            return host

        yield new


def main() -> None:
    sys.path.append(sys.argv[1])
    import sandbox

    wanted = sys.argv[2:]
    machines = {str(level): sandbox._Machine(level, {}) for level in sandbox.Level}
    machines["bubblewrap"] = sandbox._Machine(sandbox.Level.NAMESPACES, {}, shutil.which("bwrap") or "bwrap")
    available, outcomes = {}, {}
    for way, machine in machines.items():
        sandbox._probed = lambda machine=machine: machine
        try:
            found = sandbox.run_python("print(1)")
        except sandbox.SandboxError as error:
            outcomes[way] = {"": str(error)}
        else:
            assert found.ok, found
            available[way] = machine
    home = os.path.expanduser("~")
    with hosts() as new_host, contextlib.ExitStack() as stack:
        # The home folder's own file where there is one that we may write.
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", dir=home, prefix=".sandbox-escape-"))
        except OSError:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix=".sandbox-escape-"))
        for way, machine in available.items():
            sandbox._probed = lambda machine=machine: machine
            host = new_host()
            file.seek(0)
            file.write(host.secret)
            file.flush()

            def one(name: str, host: Host = host, level: Any = machine.level) -> str:
                return make(sandbox, name, host, file.name, level)

            names = wanted or list(ATTEMPTS)
            with ThreadPoolExecutor(sandbox.at_once()) as threads:
                outcomes[way] = dict(zip(names, threads.map(one, names), strict=True))
            if "signals to other processes" in names and host.victim.poll() is not None:
                outcomes[way]["signals to other processes"] = "the process was killed"
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    before = time.monotonic()
    main()
    print(f"{time.monotonic() - before:.1f} s", file=sys.stderr)
