"""The folder of checkpoints: whatever moment a run is killed at, a whole checkpoint is found; what is kept, and damage."""

import json
import logging
import os
import socket

import pytest

from openrlhf.checkpoint.folder import (
    FORMAT,
    GIB,
    MANIFEST,
    CheckpointError,
    CheckpointFolder,
    Disk,
    Retention,
    damage_of,
)


class Killed(BaseException):
    """The process is gone: nothing may catch it and tidy up."""


class DyingDisk(Disk):
    """Works up to call number `at`, does half of that one, and nothing ever after."""

    def __init__(self, at):
        self.at, self.calls = at, []

    def _alive(self, name):
        self.calls.append(name)
        if len(self.calls) > self.at:
            raise Killed

    def make_folder(self, path):
        self._alive("make_folder")
        super().make_folder(path)
        self._last()

    def write_text(self, path, text):
        self._alive("write_text")
        super().write_text(path, text[: len(text) // 2] if len(self.calls) == self.at else text)
        self._last()

    def sync_tree(self, folder):
        self._alive("sync_tree")
        self._last()

    def rename(self, old, new):
        self._alive("rename")
        super().rename(old, new)
        self._last()

    def link_tree(self, source, target, *, without=None):
        self._alive("link_tree")
        if len(self.calls) == self.at:
            target.mkdir()
        else:
            super().link_tree(source, target, without=without)
        self._last()

    def remove(self, path):
        self._alive("remove")
        if len(self.calls) == self.at and path.is_dir():
            next(p for p in sorted(path.rglob("*")) if p.is_file()).unlink()
        else:
            super().remove(path)
        self._last()

    def _last(self):
        if len(self.calls) == self.at:
            raise Killed


def opened(path, *, max_num=3, max_gib=float("inf"), **options):
    folder = CheckpointFolder(path, Retention(max_num=max_num, max_gib=max_gib), **options)
    folder.open()
    return folder


def write(folder, step, *, size=10, best=False):
    draft = folder.begin(step)
    (draft / "state.json").write_text(f'{{"step": {step}}}')
    (draft / "model" / "training_state").mkdir(parents=True)
    (draft / "model" / "training_state" / "tensors-00001.safetensors").write_bytes(bytes(size))
    (draft / "model" / "config.json").write_text("{}")
    folder.commit(step, best=best)


def names(path):
    return sorted(p.name for p in path.iterdir() if p.name != ".lock")


class TestWriting:
    def test_one_after_the_other_and_latest_names_the_last(self, tmp_path):
        folder = opened(tmp_path)
        assert folder.newest_complete() is None
        for step in (2, 10):
            write(folder, step)
            assert folder.newest_complete() == tmp_path / f"global_step{step}"
            assert (tmp_path / "latest").read_text() == f"global_step{step}\n"
        assert names(tmp_path) == ["global_step10", "global_step2", "latest"]

    @pytest.mark.parametrize("best", [False, True], ids=["", "best"])
    @pytest.mark.parametrize("link_model", [None, "model"], ids=["", "linked"])
    def test_killed_at_any_moment_a_whole_checkpoint_is_found(self, tmp_path, link_model, best):
        """Steps 1 and 2 are there, one is kept besides the latest. Writing 3 is killed at every call it makes to the disk:
        then 2 is found, or 3, never neither; the next start clears what is left, and writing goes on."""
        at = found_new = 0
        while True:
            at += 1
            path = tmp_path / str(at)
            healthy = opened(path, max_num=2, link_model=link_model)
            write(healthy, 1)
            write(healthy, 2, best=best)
            healthy.close()
            disk = DyingDisk(at)
            folder = CheckpointFolder(path, Retention(max_num=2), link_model=link_model, disk=disk)
            try:
                folder.open()
                write(folder, 3, best=best)
            except Killed:
                folder.close()  # the system takes a killed process's locks away
            else:
                break
            again = opened(path, max_num=2, link_model=link_model)
            assert not [name for name in names(path) if name.startswith(".")], disk.calls
            found = again.newest_complete()
            assert found in (path / "global_step2", path / "global_step3"), disk.calls
            assert damage_of(found) is None
            found_new += found.name == "global_step3"
            write(again, 3, best=best)
            write(again, 4)
            kept = ["global_step3", "global_step4"]
            linked = [f"{name}_hf" for name in kept] if link_model else []
            bests = ["best_global_step3"] if best else []
            assert names(path) == sorted([*bests, *kept, *linked, "latest"]), disk.calls
            again.close()
        assert at - 1 >= len(disk.calls) >= 9
        assert 0 < found_new < at - 1

    def test_an_abandoned_step_is_replaced_whole(self, tmp_path):
        folder = opened(tmp_path)
        write(folder, 1, size=10)
        (tmp_path / "global_step1" / "stale").touch()
        write(folder, 1, size=20)
        assert not (tmp_path / "global_step1" / "stale").exists()
        assert damage_of(tmp_path / "global_step1") is None

    def test_a_draft_can_be_given_up(self, tmp_path):
        folder = opened(tmp_path)
        folder.begin(1)
        folder.discard(1)
        assert names(tmp_path) == []

    def test_the_linked_model_is_the_model_without_its_training_state(self, tmp_path):
        write(opened(tmp_path, link_model="model"), 1)
        linked, model = tmp_path / "global_step1_hf", tmp_path / "global_step1" / "model"
        assert names(linked) == ["config.json"]
        assert os.path.samefile(linked / "config.json", model / "config.json")

    def test_where_there_is_no_room_nothing_is_begun(self, tmp_path):
        folder = opened(tmp_path)
        with pytest.raises(CheckpointError, match=r"takes about 9.31e\+08 GiB, and .* GiB are free"):
            folder.require_room(10**18)
        folder.require_room(1)
        write(folder, 1)
        folder.require_room(10**18)  # what the last one took is the better guess

    def test_one_run_at_a_time(self, tmp_path):
        first = opened(tmp_path)
        with pytest.raises(
            CheckpointError, match=f"the run with process id {os.getpid()} on {socket.gethostname()} writes checkpoints"
        ):
            opened(tmp_path)
        first.close()
        opened(tmp_path).close()


class TestRetention:
    def test_by_number(self, tmp_path):
        folder = opened(tmp_path, max_num=2, link_model="model")
        for step in (1, 2, 3):
            write(folder, step)
        kept = ["global_step2", "global_step3"]
        assert names(tmp_path) == sorted([*kept, *(f"{name}_hf" for name in kept), "latest"])

    def test_the_best_stays_beside_them_until_a_better_one_comes(self, tmp_path):
        folder = opened(tmp_path, max_num=1)
        for step, best in ((1, True), (2, False), (3, True), (4, False)):
            write(folder, step, best=best)
        assert names(tmp_path) == ["best_global_step3", "global_step4", "latest"]
        assert damage_of(tmp_path / "best_global_step3") is None

    def test_by_size(self, tmp_path):
        """A checkpoint of 4000 bytes and its manifest; 10000 hold two of them."""
        folder = opened(tmp_path, max_num=10, max_gib=10_000 / GIB)
        for step in (1, 2, 3):
            write(folder, step, size=4000)
        assert folder.steps == [2, 3]

    def test_the_latest_stays_whatever_its_size(self, tmp_path):
        folder = opened(tmp_path, max_num=1, max_gib=1e-9)
        write(folder, 1)
        write(folder, 2)
        assert folder.steps == [2]

    def test_steps_of_a_run_that_was_not_continued_go_first(self, tmp_path):
        """Back at step 2 after 5 and 6 turned out damaged: writing 3 must keep what the run really did."""
        folder = opened(tmp_path, max_num=10)
        for step in (1, 2, 5, 6):
            write(folder, step)
        folder.close()
        folder = opened(tmp_path, max_num=3)
        write(folder, 3)
        assert folder.steps == [1, 2, 3]


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = opened(tmp_path)
        for step in (1, 2, 3):
            write(folder, step)
        return folder

    @staticmethod
    def spoil(checkpoint, how):
        shard = checkpoint / "model" / "training_state" / "tensors-00001.safetensors"
        match how:
            case "truncated":
                shard.write_bytes(bytes(9))
            case "changed":
                shard.write_bytes(b"\1" + bytes(9))
            case "missing":
                shard.unlink()
            case "no manifest":
                (checkpoint / "manifest.json").unlink()
            case "half a manifest":
                (checkpoint / "manifest.json").write_text('{"files": {"state')
            case "empty state":
                (checkpoint / "state.json").write_text("")

    @pytest.mark.parametrize(
        ("how", "said"),
        [
            ("truncated", "has 9 bytes of 10"),
            ("changed", "tensors-00001.safetensors is damaged"),
            ("missing", "tensors-00001.safetensors is missing"),
            ("no manifest", "manifest.json is missing or damaged"),
            ("half a manifest", "manifest.json is missing or damaged"),
            ("empty state", "state.json has 0 bytes"),
        ],
    )
    def test_the_newest_whole_one_stands_in_and_it_is_said(self, folder, caplog, how, said):
        self.spoil(folder.path / "global_step3", how)
        with caplog.at_level(logging.WARNING):
            assert folder.newest_complete() == folder.path / "global_step2"
        assert said in caplog.text
        assert "global_step2 is used instead" in caplog.text

    def test_all_damaged_is_an_error(self, folder):
        for step in folder.steps:
            self.spoil(folder.path / f"global_step{step}", "truncated")
        with pytest.raises(CheckpointError, match="no checkpoint there can be continued from"):
            folder.newest_complete()

    @pytest.mark.parametrize("text", ["global_step9\n", "", "../elsewhere", "\x00"])
    def test_a_latest_that_leads_nowhere(self, folder, text):
        (folder.path / "latest").write_text(text)
        assert folder.newest_complete() == folder.path / "global_step3"

    def test_without_latest_the_newest(self, folder):
        (folder.path / "latest").unlink()
        assert folder.newest_complete() == folder.path / "global_step3"

    def test_latest_decides(self, folder):
        """Users go back by editing it."""
        (folder.path / "latest").write_text("global_step1")
        assert folder.newest_complete() == folder.path / "global_step1"

    def test_the_model_folder_is_the_users(self, folder):
        (folder.path / "global_step3" / "model" / "config.json").write_text('{"edited": true}')
        assert folder.newest_complete() == folder.path / "global_step3"


class TestFormat:
    """Steps 1 and 2, whose manifests are then changed to what other versions write."""

    @pytest.fixture
    def folder(self, tmp_path):
        folder = opened(tmp_path)
        write(folder, 1)
        write(folder, 2)
        return folder

    @staticmethod
    def change(checkpoint, **fields):
        manifest = json.loads((checkpoint / MANIFEST).read_text()) | fields
        kept = {name: value for name, value in manifest.items() if value is not None}
        (checkpoint / MANIFEST).write_text(json.dumps(kept))

    def test_the_number_is_written(self, folder):
        assert json.loads((folder.path / "global_step2" / MANIFEST).read_text())["format"] == FORMAT

    def test_an_older_checkpoint_without_a_number_is_read(self, folder, caplog):
        self.change(folder.path / "global_step2", format=None)
        assert folder.newest_complete() == folder.path / "global_step2"
        assert not caplog.records

    def test_a_later_format_is_refused_by_name_although_an_earlier_checkpoint_is_there(self, folder):
        self.change(folder.path / "global_step2", format=FORMAT + 1)
        with pytest.raises(
            CheckpointError, match=rf"global_step2 was written in format {FORMAT + 1} by a later version"
        ):
            folder.newest_complete()

    def test_the_remedy_of_a_later_format_works(self, folder):
        self.change(folder.path / "global_step2", format=FORMAT + 1)
        (folder.path / "latest").write_text("global_step1")
        assert folder.newest_complete() == folder.path / "global_step1"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        opened(tmp_path / "file" / "checkpoints")
