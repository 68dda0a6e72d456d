"""Data sources: what is read, in which order, and what is said when it cannot be."""

import json
import time

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience

from openrlhf.data.sources import DataError, _short_names, interleaved_rows, load_records, parse_probabilities


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def refused(spec, **options):
    with pytest.raises(DataError) as caught:
        load_records(spec, **options)
    return str(caught.value)


class TestJson:
    def test_records_stay_as_written(self, in_tmp):
        """`datasets` would give 7, a datetime and a float; labels are compared with, so they must not change."""
        written = [
            {"input": "a", "label": "007"},
            {"input": "b", "label": 7},
            {"input": "c", "label": "2024-01-31"},
            {"input": "d", "label": 123456789012345678901234567890},
            {"input": [{"role": "user", "content": "x"}], "only_here": {"deep": [1, "2", None]}},
        ]
        write_jsonl(in_tmp / "train.jsonl", written)
        assert list(load_records("train.jsonl")) == written

    @settings(max_examples=30)
    @given(
        st.lists(
            st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())),
            min_size=1,
            max_size=8,
        )
    )
    def test_any_objects_come_back(self, tmp_path_factory, written):
        path = write_jsonl(tmp_path_factory.mktemp("json") / "any.jsonl", written)
        assert list(load_records(str(path))) == written

    @pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
    def test_a_list_of_objects_in_either_suffix(self, in_tmp, name):
        (in_tmp / name).write_text('[\n  {"input": "x"},\n  {"input": "y"}\n]\n')
        assert [record["input"] for record in load_records(name)] == ["x", "y"]

    def test_lines_in_a_json_file_blank_lines_and_a_byte_order_mark(self, in_tmp):
        (in_tmp / "a.json").write_bytes(b'\xef\xbb\xbf{"input": "x"}\r\n\r\n{"input": "y"}')
        assert [record["input"] for record in load_records("a.json")] == ["x", "y"]

    def test_one_object_over_several_lines_is_one_record(self, in_tmp):
        (in_tmp / "a.json").write_text('{\n "input": "x"\n}\n')
        assert list(load_records("a.json")) == [{"input": "x"}]

    def test_malformed_line_is_named_and_shown(self, in_tmp):
        (in_tmp / "bad.jsonl").write_text('{"input": "x"}\n\n{"input": "y" "label": 1}\n')
        message = refused("bad.jsonl")
        assert message == (
            "bad.jsonl, line 3 is not JSON (Expecting ',' delimiter, column 15): " + '{"input": "y" "label": 1}'
        )

    def test_only_the_beginning_of_a_long_line_is_shown(self, in_tmp):
        (in_tmp / "bad.jsonl").write_text('{"input": "' + "y" * 500)
        message = refused("bad.jsonl")
        assert message.endswith("yyy…")
        assert len(message) < 200

    @pytest.mark.parametrize(
        ("line", "what"), [("[1, 2]", "a list"), ('"text"', "a string"), ("3", "a number"), ("null", "null")]
    )
    def test_line_that_is_no_object(self, in_tmp, line, what):
        (in_tmp / "bad.jsonl").write_text(line + '\n{"input": "x"}\n')
        assert f"bad.jsonl, line 1 is {what}, not an object" in refused("bad.jsonl")

    def test_item_that_is_no_object(self, in_tmp):
        (in_tmp / "bad.json").write_text('[{"input": "x"}, "y"]')
        assert "bad.json, item 2 of the list is a string, not an object" in refused("bad.json")

    def test_malformed_list_names_its_line(self, in_tmp):
        (in_tmp / "bad.json").write_text('[\n{"input": "x"},\n{"input": y}\n]')
        assert refused("bad.json").startswith("bad.json, line 3 is not JSON")

    def test_bytes_that_are_not_text(self, in_tmp):
        (in_tmp / "bad.jsonl").write_bytes(b'{"input": "x"}\n{"input": "\xff"}\n')
        assert refused("bad.jsonl").startswith("bad.jsonl, line 2 is not JSON ('utf-8' codec can't decode")

    @pytest.mark.parametrize("content", ["", " \n\n"])
    def test_empty_file(self, in_tmp, content):
        (in_tmp / "empty.jsonl").write_text(content)
        assert refused("empty.jsonl") == "empty.jsonl is empty"

    def test_empty_list(self, in_tmp):
        (in_tmp / "empty.json").write_text("[]")
        assert refused("empty.json") == "--data.prompt_dataset: empty.json has no records"

    @pytest.mark.parametrize(
        ("content", "where"),
        [
            (b'{"input": "fine"}\n{"input": "half \\ud83d"}\n', "a.jsonl, line 2"),
            (b'{"input": [{"role": "user", "content": "\\uDE00"}]}\n', "a.jsonl, line 1"),
            (b'{"input": "\xed\xa0\x80"}\n', "a.jsonl, line 1"),
            (b'[{"input": "x"},\n{"input": "\\ud83d"}]', "a.jsonl, item 2 of the list"),
        ],
    )
    def test_half_a_character_is_named(self, in_tmp, content, where):
        """Python reads a lone surrogate, and no tokenizer takes it."""
        (in_tmp / "a.jsonl").write_bytes(content)
        message = refused("a.jsonl")
        assert message.startswith(f"{where} has half a character under 'input' (\\ud")
        assert "\n" not in message

    def test_both_halves_are_a_character(self, in_tmp):
        (in_tmp / "a.jsonl").write_bytes('{"input": "\\ud83d\\ude00 한국어"}\n'.encode())
        assert load_records("a.jsonl")[0] == {"input": "\N{GRINNING FACE} 한국어"}

    def test_a_very_long_line_is_named(self, in_tmp, caplog, monkeypatch):
        monkeypatch.setattr("openrlhf.data.files.LONG_LINE", 3_000_000)
        write_jsonl(in_tmp / "a.jsonl", [{"input": "x"}, {"input": "y" * 4_000_000}])
        assert len(load_records("a.jsonl")) == 2
        assert caplog.messages == ["a.jsonl, line 2 is one record of 4 MB: is a line break missing?"]

    def test_lists_in_lists_without_end(self, in_tmp):
        (in_tmp / "a.jsonl").write_text('{"input": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
        assert refused("a.jsonl").startswith("a.jsonl, line 1 is not JSON (maximum recursion depth")

    def test_file_edited_later_changes_nothing(self, in_tmp):
        path = write_jsonl(in_tmp / "a.jsonl", [{"input": "x"}, {"input": "y"}])
        records = load_records("a.jsonl")
        path.write_text("overwritten")
        assert records[1] == {"input": "y"}


class TestTables:
    def test_csv_keeps_words_that_look_like_missing_values(self, in_tmp):
        (in_tmp / "a.csv").write_text("input,label\nq,NA\nr,None\ns,\n")
        assert [record["label"] for record in load_records("a.csv")] == ["NA", "None", None]

    @pytest.mark.parametrize("kind", ["parquet", "arrow"])
    def test_columnar_files(self, in_tmp, kind):
        table = datasets.Dataset.from_list([{"input": "x", "label": "007"}])
        if kind == "parquet":
            table.to_parquet(in_tmp / "a.parquet")
        else:
            table.save_to_disk(in_tmp / "saved")
            (in_tmp / "saved" / "data-00000-of-00001.arrow").rename(in_tmp / "a.arrow")
        assert list(load_records(f"a.{kind}")) == [{"input": "x", "label": "007"}]

    @pytest.mark.parametrize("folder", [False, True])
    def test_no_home_is_needed(self, in_tmp, monkeypatch, folder):
        """Where `datasets` would keep what it reads there can be no folder, for any user: a file is in its place."""
        (in_tmp / "data").mkdir()
        (in_tmp / "data" / "a.csv").write_text("input,label\nq,1\n")
        (in_tmp / "home").write_text("")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", in_tmp / "home" / "cache" / "datasets")
        assert [record["input"] for record in load_records("data" if folder else "data/a.csv")] == ["q"]

    def test_malformed_csv(self, in_tmp):
        (in_tmp / "bad.csv").write_text("a,b\n1,2\n3,4,5,6\n")
        message = refused("bad.csv")
        assert message.startswith("bad.csv cannot be read as csv: ")
        assert "Expected 2 fields in line 3, saw 4" in message

    @pytest.mark.parametrize("kind", ["parquet", "arrow"])
    def test_malformed_columnar_file(self, in_tmp, kind):
        (in_tmp / f"bad.{kind}").write_text("junk")
        assert refused(f"bad.{kind}").startswith(f"bad.{kind} cannot be read as {kind}: ")

    @pytest.mark.parametrize("kind", ["csv", "parquet"])
    def test_empty_file(self, in_tmp, kind):
        (in_tmp / f"empty.{kind}").touch()
        assert refused(f"empty.{kind}") == f"empty.{kind} is empty"

    def test_csv_with_a_header_only(self, in_tmp):
        (in_tmp / "a.csv").write_text("input,label\n")
        assert refused("a.csv") == "--data.prompt_dataset: a.csv has no records"


class TestFolders:
    @pytest.fixture
    def saved(self, in_tmp):
        """A folder with the splits train (2 records) and test (1)."""
        splits = {
            "train": datasets.Dataset.from_list([{"input": "a"}, {"input": "b"}]),
            "test": datasets.Dataset.from_list([{"input": "c"}]),
        }
        datasets.DatasetDict(splits).save_to_disk(in_tmp / "saved")
        return "saved"

    def test_split_of_a_saved_data_set(self, saved):
        assert [record["input"] for record in load_records(saved, split="test")] == ["c"]

    def test_unknown_split_names_those_there_are(self, saved):
        assert refused(saved, split="dev", flag="--eval.dataset") == (
            "--eval.dataset: saved has no split 'dev': set --eval.split to one of train, test"
        )

    def test_data_dir_after_an_at_sign(self, in_tmp, saved):
        assert len(load_records(f"{in_tmp}@{saved}")) == 2

    def test_folder_of_files(self, in_tmp):
        (in_tmp / "folder").mkdir()
        write_jsonl(in_tmp / "folder" / "train.jsonl", [{"input": "a"}])
        write_jsonl(in_tmp / "folder" / "test.jsonl", [{"input": "b"}])
        assert list(load_records("folder", split="test")) == [{"input": "b"}]
        assert refused("folder", split="dev") == (
            "--data.prompt_dataset: folder has no split 'dev': set --data.prompt_split to one of train, test"
        )

    def test_folder_without_data(self, in_tmp):
        (in_tmp / "folder").mkdir()
        assert refused("folder").startswith("--data.prompt_dataset: folder cannot be loaded: ")

    def test_a_single_file_has_no_splits(self, in_tmp):
        write_jsonl(in_tmp / "a.jsonl", [{"input": "x"}])
        assert len(load_records("a.jsonl", split="test")) == 1

    def test_path_with_an_at_sign(self, in_tmp):
        write_jsonl(in_tmp / "me@home.jsonl", [{"input": "x"}])
        assert len(load_records("me@home.jsonl")) == 1


class TestPatternsAndAddresses:
    @pytest.fixture
    def parts(self, in_tmp):
        (in_tmp / "parts").mkdir()
        for name in ("b", "a", "c"):
            write_jsonl(in_tmp / "parts" / f"{name}.jsonl", [{"input": f"{name}{i}"} for i in range(2)])
        return "parts/*.jsonl"

    def test_the_files_of_a_pattern_follow_one_another(self, parts):
        records = load_records(parts)
        assert [record["input"] for record in records] == ["a0", "a1", "b0", "b1", "c0", "c1"]
        assert records.where(3) == "record 2 of b.jsonl"
        limited = load_records(parts, max_samples=3)
        assert [record["input"] for record in limited] == ["a0", "a1", "b0"]

    def test_a_pattern_is_one_entry_of_a_mixture(self, in_tmp, parts):
        write_jsonl(in_tmp / "other.jsonl", [{"input": f"x{i}"} for i in range(6)])
        records = load_records(f"{parts},other.jsonl", probs="0.5,0.5", seed=1)
        theirs = interleaved_rows([6, 6], probs=[0.5, 0.5], seed=1)
        names = [["a0", "a1", "b0", "b1", "c0", "c1"], [f"x{i}" for i in range(6)]]
        assert [record["input"] for record in records] == [names[entry][row] for entry, row in theirs.tolist()]

    def test_a_pattern_without_a_file(self, in_tmp):
        assert refused("parts/*.jsonl").startswith(
            f"--data.prompt_dataset: parts/*.jsonl matches no file (looked in {in_tmp}): give a .jsonl"
        )

    def test_a_file_with_a_star_in_its_name(self, in_tmp):
        write_jsonl(in_tmp / "a*.jsonl", [{"input": "starred"}])
        write_jsonl(in_tmp / "ab.jsonl", [{"input": "other"}])
        assert list(load_records("a*.jsonl")) == [{"input": "starred"}]

    def test_each_record_knows_the_folder_of_its_file(self, in_tmp, parts):
        (in_tmp / "other.jsonl").write_text('{"input": "a"}\n')
        records = load_records("parts/*.jsonl,other.jsonl")
        assert records.folder(0) == in_tmp / "parts"
        assert records.folder(len(records) - 1) == in_tmp

    def test_addresses_of_files(self, in_tmp):
        write_jsonl(in_tmp / "my data.jsonl", [{"input": "x"}])
        for address in (f"file://{in_tmp}/my%20data.jsonl", f"file://localhost{in_tmp}/my data.jsonl"):
            assert list(load_records(address)) == [{"input": "x"}]
        assert "there is no file /nope.jsonl" in refused("file:///nope.jsonl")

    @pytest.mark.parametrize(
        ("url", "asked"),
        [
            ("hf://datasets/org/name", ("org/name", {})),
            ("hf://org/name", ("org/name", {})),
            ("hf://datasets/squad", ("squad", {})),
            ("hf://datasets/org/name@v2", ("org/name", {"revision": "v2"})),
            ("hf://datasets/org/name@v2/data/*.parquet", ("org/name", {"revision": "v2", "data_files": "data/*.parquet"})),
            ("hf://datasets/squad/train.parquet", ("squad", {"data_files": "train.parquet"})),
        ],
    )  # fmt: skip
    def test_addresses_of_the_hub(self, monkeypatch, url, asked):
        """What `datasets` is asked for; the Hub itself cannot be reached from a test."""
        calls = []

        def load_dataset(name, *, split, data_dir, **options):
            calls.append((name, options))
            return datasets.Dataset.from_list([{"input": split}])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr("openrlhf.data.files.hub_reachable", lambda: True)
        assert list(load_records(url, split="dev")) == [{"input": "dev"}]
        assert calls == [asked]

    def test_an_address_of_the_hub_without_a_name(self):
        assert "hf://datasets/ must be hf://datasets/ORG/NAME" in refused("hf://datasets/")


class TestMissing:
    @pytest.mark.parametrize("name", ["nope.jsonl", "data/nope.json", "./nope", "/nope/at/all", "a/b/c"])
    def test_path_is_not_tried_on_the_hub(self, in_tmp, name, monkeypatch):
        monkeypatch.setattr("openrlhf.data.sources.read_hub", lambda *_, **__: pytest.fail("asked the Hub"))
        assert refused(name) == (
            f"--data.prompt_dataset: there is no file {name} (looked in {in_tmp}): give a .jsonl, .json, .csv, "
            f".parquet or .arrow file, a pattern such as 'folder/*.jsonl', a folder, or a Hub name such as org/name"
        )

    def test_unreachable_hub_is_said_quickly(self, in_tmp, monkeypatch):
        """Port 9 of the loopback refuses at once, as a machine without a network does."""
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        before = time.monotonic()
        message = refused("org/name", flag="--eval.dataset")
        assert time.monotonic() - before < patience(5)
        assert message.startswith("--eval.dataset: org/name is neither a local file or folder (looked in")
        assert "the Hub cannot be reached" in message

    def test_unknown_kind_of_file(self, in_tmp):
        (in_tmp / "notes.txt").write_text("x")
        assert refused("notes.txt").startswith("--data.prompt_dataset: cannot tell what kind of data notes.txt is")

    def test_loading_scripts_are_refused_with_the_reason(self, in_tmp):
        (in_tmp / "script.py").touch()
        (in_tmp / "folder").mkdir()
        (in_tmp / "folder" / "folder.py").touch()
        assert f"script.py is a loading script, which datasets {datasets.__version__} no longer runs" in refused(
            "script.py"
        )
        assert "folder/folder.py is a loading script" in refused("folder")

    def test_nothing_given(self):
        assert refused(" , ").startswith("--data.prompt_dataset is empty")


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a/math.jsonl"], [""]),
        (["a/math.jsonl", "b/code.parquet", "org/chat@part"], ["math", "code", "chat_part"]),
        (["a/train.jsonl", "b/train.jsonl"], ["a_train.jsonl", "b_train.jsonl"]),
        (["a/*.jsonl", "openrlhf.worlds.reasoning_gym"], ["a_.jsonl", "openrlhf.worlds.reasoning_gym"]),
    ],
)
def test_entries_have_short_names_that_differ(names, short):
    assert _short_names(names) == short


class TestMixing:
    @pytest.fixture
    def two(self, in_tmp):
        write_jsonl(in_tmp / "a.jsonl", [{"input": f"a{i}"} for i in range(6)])
        (in_tmp / "b.csv").write_text("input,label\n" + "".join(f"b{i},{i}\n" for i in range(3)))
        return "a.jsonl,b.csv"

    def test_one_after_the_other_with_different_keys(self, two):
        records = load_records(two)
        assert [record["input"] for record in records] == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "b2"]
        assert records[7] == {"input": "b1", "label": 1}
        assert records.where(6) == "record 1 of b.csv"
        assert records[1:].where(0) == "record 2 of a.jsonl"

    def test_a_limit_is_of_the_mixture(self, two, caplog):
        """As many records as asked for, not as many of each source; a source that has none left is named."""
        assert [record["input"] for record in load_records(two, max_samples=7)] == [*(f"a{i}" for i in range(6)), "b0"]
        assert not caplog.messages
        assert [record["input"] for record in load_records(two, max_samples=2)] == ["a0", "a1"]
        assert caplog.messages == ["--data.prompt_dataset: --data.max_samples 2 leaves no record of b.csv"]
        drawn = load_records(two, probs="0.5,0.5", max_samples=4)
        # Of six and three records the first four and three are mixed: the beginning of that mixture.
        assert list(drawn) == list(load_records(two, probs="0.5,0.5"))[:4]
        assert len(drawn) == 4

    def test_drawn_until_every_source_has_been_read(self, two):
        records = load_records(two, probs="0.5,0.5", seed=3)
        assert {record["input"] for record in records} == {*(f"a{i}" for i in range(6)), "b0", "b1", "b2"}
        assert list(records) == list(load_records(two, probs=[0.5, 0.5], seed=3))
        assert list(records) != list(load_records(two, probs="0.5,0.5", seed=4))

    @settings(max_examples=25, deadline=None)
    @given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), seed=st.integers(0, 1000))
    def test_same_order_as_datasets(self, lengths, seed):
        sources = [
            datasets.Dataset.from_list([{"x": f"{source}/{i}"} for i in range(n)]) for source, n in enumerate(lengths)
        ]
        probs = [1 / len(lengths)] * len(lengths)
        theirs = datasets.interleave_datasets(
            sources, probabilities=probs, seed=seed, stopping_strategy="all_exhausted"
        )
        ours = interleaved_rows(lengths, probs=probs, seed=seed)
        assert [f"{source}/{row}" for source, row in ours.tolist()] == theirs["x"][:]

    @pytest.mark.parametrize(
        ("probs", "message"),
        [
            ("1.0", "--data.prompt_probs has 1 values, --data.prompt_dataset has 2 data sets: give one for each"),
            ("0.5,x", "--data.prompt_probs must be a comma list of numbers such as 0.7,0.3, got '0.5,x'"),
            ("1,0", "--data.prompt_probs must be positive numbers"),
            ("0.5,0.4", "--data.prompt_probs must add up to 1, got '0.5,0.4' (sum 0.9)"),
        ],
    )
    def test_probabilities_that_do_not_match(self, two, probs, message):
        assert message in refused(two, probs=probs)

    def test_rounded_thirds_are_fine(self):
        parsed = parse_probabilities("0.3333333,0.3333333,0.3333334", count=3, flag="--data.dataset")
        assert sum(parsed) == pytest.approx(1.0, abs=1e-15)
