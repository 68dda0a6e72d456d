"""Tokens are the same however they are made: in one process or several, now or in an earlier run."""

import logging
import os
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from jsonl_records import written
from small_tokenizers import tokenizer

from openrlhf.data import tokenisation
from openrlhf.data.examples import ExampleFormat, ExampleSet
from openrlhf.data.files import DataError
from openrlhf.data.tokenisation import cached

RECORDS = [{"input": f"Q{i}", "a": " a" * (i % 7)} for i in range(1200)]
"""More than two chunks; each seventh has an empty answer."""


def contents(examples):
    return [(example.token_ids.tolist(), example.target_mask.tolist(), example.where) for example in examples]


def examples(records, *, max_len=50, input_template=None, chat_template=None, **options):
    return ExampleSet(
        records,
        ExampleFormat(output_key="a", input_template=input_template),
        tokenizer=tokenizer(chat_template=chat_template),
        max_len=max_len,
        **options,
    )


@dataclass(frozen=True)
class CountingFormat:
    """Writes a byte for every record it reads, from whichever process."""

    log: str

    places = None

    def read(self, record, tokenizer, folder=None):
        with open(self.log, "ab") as file:
            file.write(b".")
        return ExampleFormat(output_key="a").read(record, tokenizer)


class TestProcesses:
    def test_several_processes_give_what_one_gives(self, tmp_path):
        records = written(tmp_path, RECORDS)
        one, two = examples(records, workers=1), examples(records, workers=2)
        assert contents(two) == contents(one)
        assert two.skipped == one.skipped == {"have an empty answer": 172}

    def test_an_error_in_another_process_names_its_record(self, tmp_path):
        records = written(tmp_path, [*RECORDS, {"input": "Q", "a": 5}])
        with pytest.raises(DataError, match=r"^--data.dataset, record 1201 of train.jsonl: its 'a' must be a string"):
            examples(records, workers=2)

    def test_what_cannot_be_copied_works_alone(self, tmp_path, caplog):
        records = written(tmp_path, RECORDS[:20])

        @dataclass(frozen=True)
        class Local(CountingFormat):
            """Of a function: no other process can find it."""

        with caplog.at_level(logging.WARNING):
            alone = ExampleSet(records, Local(str(tmp_path / "log")), tokenizer=tokenizer(), max_len=50, workers=2)
        assert contents(alone) == contents(examples(records))
        assert "tokenised in one process" in caplog.text


class TestCache:
    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path / "cache"

    def test_a_second_run_reads_no_record(self, tmp_path, folder):
        records = written(tmp_path, RECORDS[:50])
        log = tmp_path / "log"
        made = [
            ExampleSet(records, CountingFormat(str(log)), tokenizer=tokenizer(), max_len=50, cache_dir=folder)
            for _ in range(2)
        ]
        assert log.stat().st_size == 50
        assert contents(made[0]) == contents(made[1]) == contents(examples(records))
        assert made[0].skipped == made[1].skipped

    @pytest.mark.parametrize("change", [{"max_len": 40}, {"input_template": "{}!"}, {"chat_template": "x"}])
    def test_other_settings_are_another_entry(self, tmp_path, folder, change):
        records = written(tmp_path, RECORDS[:50])
        examples(records, cache_dir=folder)
        examples(records, cache_dir=folder, **change)
        assert len([path for path in folder.iterdir() if path.is_dir()]) == 2

    def test_other_records_are_another_entry(self, tmp_path, folder):
        first = examples(written(tmp_path, [{"input": "Q", "a": "a"}]), cache_dir=folder)
        second = examples(written(tmp_path, [{"input": "Q", "a": "b"}]), cache_dir=folder)
        assert contents(first) != contents(second)

    def test_a_folder_that_cannot_be_written_costs_a_note(self, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        records = written(tmp_path, RECORDS[:50])
        with caplog.at_level(logging.WARNING):
            made = examples(records, cache_dir=tmp_path / "file" / "cache")
        assert contents(made) == contents(examples(records))
        assert "the tokens of --data.dataset cannot be kept in" in caplog.text

    def test_a_damaged_entry_is_made_again(self, tmp_path, folder):
        records = written(tmp_path, RECORDS[:50])
        made = contents(examples(records, cache_dir=folder))
        (ids,) = folder.glob("*/ids.npy")
        ids.write_bytes(ids.read_bytes()[:40])
        assert contents(examples(records, cache_dir=folder)) == made
        assert ids.stat().st_size > 40

    def test_a_bad_record_leaves_nothing_behind(self, tmp_path, folder):
        with pytest.raises(DataError):
            examples(written(tmp_path, [{"input": "Q", "a": 5}]), cache_dir=folder)
        assert [path for path in folder.iterdir() if path.is_dir()] == []


class TestOncePerMachine:
    def test_one_makes_and_the_others_wait(self, tmp_path):
        """Eight at once: the arrays are made once, and all get them."""
        made, results = [], []

        def make():
            made.append(os.getpid())
            return {"x": np.arange(5)}

        def ask():
            results.append(cached(tmp_path, "key", make, what="x"))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(made) == 1
        assert [result["x"].tolist() for result in results] == [[0, 1, 2, 3, 4]] * 8

    def test_who_waits_in_vain_makes_its_own(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(tokenisation, "LOCK_SECONDS", 0.1)
        from filelock import FileLock

        with FileLock(tmp_path / "key.lock"), caplog.at_level(logging.WARNING):
            ask = threading.Thread(target=lambda: cached(tmp_path, "key", lambda: {"x": np.arange(2)}, what="x"))
            ask.start()
            ask.join(timeout=60)
        assert "in vain; made here as well" in caplog.text


def test_enough_records_use_the_machines_cores(tmp_path, monkeypatch):
    """From `PARALLEL_FROM` records on; below, the start of other processes costs more than they save."""
    seen = []
    monkeypatch.setattr(tokenisation, "_in_parallel", lambda records, work, workers: seen.append(workers) or [])
    monkeypatch.setattr(tokenisation, "_cores", lambda: 4)
    monkeypatch.setattr(tokenisation, "_joined", lambda parts: parts)
    monkeypatch.setattr(tokenisation, "PARALLEL_FROM", 100)
    work = tokenisation._Work(ExampleFormat(output_key="a"), tokenisation.Encoder(tokenizer(), max_len=50))
    for count in (99, 100):
        tokenisation._tokenise(written(tmp_path, RECORDS[:count]), work, workers=None, flag="--data.dataset")
    assert seen == [4]
