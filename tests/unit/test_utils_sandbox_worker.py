"""The filters of system calls, evaluated as the kernel would: the program is data, and so are the calls."""

import errno
import struct

import pytest

from openrlhf.utils import sandbox_worker as worker

ALLOWED, NO_PERMISSION = worker.ALLOW, worker.DENY | errno.EPERM


def verdict(program, number, *, architecture, first_argument=0, second_argument=0):
    """What classic BPF answers for a `struct seccomp_data`."""
    kind = worker.AUDIT_ARCHITECTURES[architecture]
    data = struct.pack("IIQQQ", number, kind, 0, first_argument, second_argument)
    lines = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == worker.LOAD:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == worker.MASK:
            accumulator &= value
        elif code == worker.RETURN:
            return value
        else:
            met = {
                worker.JUMP_EQUAL: accumulator == value,
                worker.JUMP_ANY_BIT: bool(accumulator & value),
                worker.JUMP_AT_LEAST: accumulator >= value,
            }[code]
            at += if_true if met else if_false


@pytest.fixture(params=["x86_64", "aarch64"])
def architecture(request, monkeypatch):
    monkeypatch.setattr(worker, "ARCHITECTURE", request.param)
    return request.param


# From the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
NUMBERS = {
    "x86_64": {"read": 0, "socket": 41, "socketpair": 53, "clone": 56, "kill": 62, "chmod": 90, "ptrace": 101,
               "prctl": 157, "execve": 59, "tgkill": 234, "fchmodat": 268, "prlimit64": 302, "unshare": 272,
               "io_uring_setup": 425, "memfd_create": 319, "mount": 165, "truncate": 76, "ftruncate": 77,
               "ioctl": 16, "fchmod": 91, "fchown": 93, "fsetxattr": 190, "fremovexattr": 199, "shmat": 30,
               "shmctl": 31, "semop": 65, "semctl": 66, "semtimedop": 220, "msgsnd": 69, "msgrcv": 70,
               "msgctl": 71, "inotify_add_watch": 254, "file_setattr": 469},
    "aarch64": {"read": 63, "socket": 198, "socketpair": 199, "clone": 220, "kill": 129, "ptrace": 117,
                "prctl": 167, "execve": 221, "tgkill": 131, "fchmodat": 53, "prlimit64": 261, "unshare": 97,
                "io_uring_setup": 425, "memfd_create": 279, "mount": 40, "truncate": 45, "ftruncate": 46,
                "ioctl": 29, "fchmod": 52, "fchown": 55, "fsetxattr": 7, "fremovexattr": 16, "shmat": 196,
                "shmctl": 195, "semop": 193, "semctl": 191, "semtimedop": 192, "msgsnd": 189, "msgrcv": 188,
                "msgctl": 187, "inotify_add_watch": 27, "file_setattr": 469},
}  # fmt: skip


class TestFilter:
    def ask(self, architecture, name, *, own_files=True, only_signal=None, **arguments):
        program = worker.filter_program(own_files=own_files, only_signal=only_signal)
        assert len(program) < 4096 * 8
        number = NUMBERS[architecture][name]
        return verdict(program, number, architecture=architecture, **arguments)

    @pytest.mark.parametrize("name", ["socket", "ptrace", "unshare", "io_uring_setup", "memfd_create", "mount"])
    @pytest.mark.parametrize("own_files", [True, False])
    def test_what_no_answer_needs(self, architecture, name, own_files):
        assert self.ask(architecture, name, own_files=own_files) == NO_PERMISSION

    @pytest.mark.parametrize("name", ["read", "ioctl", "execve", "prctl", "ftruncate"])
    @pytest.mark.parametrize("own_files", [True, False])
    def test_what_programs_need(self, architecture, name, own_files):
        assert self.ask(architecture, name, own_files=own_files) == ALLOWED

    def test_files_by_path_without_a_file_system_of_ones_own(self, architecture):
        for name in {"chmod", "fchmodat", "truncate"} & set(NUMBERS[architecture]):
            assert self.ask(architecture, name, own_files=True) == ALLOWED
            assert self.ask(architecture, name, own_files=False) == NO_PERMISSION

    @pytest.mark.parametrize("own_files", [True, False])
    def test_pairs_of_sockets_are_streams(self, architecture, own_files):
        """A datagram socket sends to any name, although it is one of a pair. 0o4000 and 0o2000000 are flags."""
        allowed = {
            kind: self.ask(architecture, "socketpair", own_files=own_files, first_argument=1, second_argument=kind)
            for kind in (1, 5, 1 | 0o2004000, 2, 2 | 0o2004000, 3, 4, 10)
        }
        assert [kind for kind, answer in allowed.items() if answer == ALLOWED] == [1, 5, 1 | 0o2004000]

    def test_what_is_open_for_reading_keeps_its_mode_and_flags(self, architecture):
        for name in ("fchmod", "fchown", "fsetxattr", "fremovexattr", "file_setattr"):
            assert self.ask(architecture, name, own_files=True) == ALLOWED
            assert self.ask(architecture, name, own_files=False) == NO_PERMISSION
        set_flags, set_attributes, terminal = 0x40086602, 0x401C5820, 0x5401
        for request in (set_flags, set_attributes):
            assert self.ask(architecture, "ioctl", own_files=True, second_argument=request) == ALLOWED
            assert self.ask(architecture, "ioctl", own_files=False, second_argument=request) == NO_PERMISSION
        assert self.ask(architecture, "ioctl", own_files=False, second_argument=terminal) == ALLOWED

    def test_what_processes_share_by_number(self, architecture):
        names = ("shmat", "shmctl", "semop", "semctl", "semtimedop", "msgsnd", "msgrcv", "msgctl", "inotify_add_watch")
        for name in names:
            assert self.ask(architecture, name, own_files=True) == ALLOWED
            assert self.ask(architecture, name, own_files=False) == NO_PERMISSION

    def test_clone_makes_processes_and_threads_and_no_namespaces(self, architecture):
        thread, fork, user_namespace = 0x3D0F00, 17, 0x10000000 | 17
        assert self.ask(architecture, "clone", first_argument=thread) == ALLOWED
        assert self.ask(architecture, "clone", first_argument=fork) == ALLOWED
        assert self.ask(architecture, "clone", first_argument=user_namespace) == NO_PERMISSION
        program = worker.filter_program(own_files=True, only_signal=None)
        assert verdict(program, 435, architecture=architecture) == worker.DENY | errno.ENOSYS

    def test_limits_of_itself_only(self, architecture):
        assert self.ask(architecture, "prlimit64", first_argument=0) == ALLOWED
        assert self.ask(architecture, "prlimit64", first_argument=4711) == NO_PERMISSION

    def test_signals_to_itself_only_where_landlock_does_not_look_at_them(self, architecture):
        for name in ("kill", "tgkill"):
            assert self.ask(architecture, name, only_signal=4711, first_argument=4711) == ALLOWED
            assert self.ask(architecture, name, only_signal=4711, first_argument=1) == NO_PERMISSION
            assert self.ask(architecture, name, only_signal=4711, first_argument=(1 << 32) - 1) == NO_PERMISSION
            assert self.ask(architecture, name, first_argument=1) == ALLOWED

    def test_calls_of_other_architectures_end_the_process(self, architecture):
        other = {"x86_64": "aarch64", "aarch64": "x86_64"}[architecture]
        program = worker.filter_program(own_files=True, only_signal=None)
        assert verdict(program, 0, architecture=other) == worker.KILL

    def test_x32(self, monkeypatch):
        monkeypatch.setattr(worker, "ARCHITECTURE", "x86_64")
        program = worker.filter_program(own_files=True, only_signal=None)
        assert verdict(program, 0x40000000 | 41, architecture="x86_64") == NO_PERMISSION


class TestOpenToAll:
    def test_every_folder_on_the_way_counts(self, tmp_path):
        assert worker.open_to_all("/")
        folder = tmp_path / "a"
        folder.mkdir()
        file = folder / "b"
        file.write_text("")
        for path, mode in ((tmp_path, 0o755), (folder, 0o755), (file, 0o644)):
            path.chmod(mode)
        if worker.open_to_all(tmp_path.parent):
            assert worker.open_to_all(file)
        folder.chmod(0o750)
        assert not worker.open_to_all(file)
        folder.chmod(0o755)
        file.chmod(0o640)
        assert not worker.open_to_all(file)
