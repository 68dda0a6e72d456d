"""The viewer's answers: only with the token, only files of runs, and only what is new."""

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer
from viewed_runs import append, make_run, metrics, rollout, write_tokens

from openrlhf.cli import view
from openrlhf.cli.main import COMMANDS
from openrlhf.viewer.server import ViewServer, name_pattern, static_files


def asked(places, *addresses, token="secret"):
    """(status, headers, body) of each address after the token."""

    async def ask():
        async with TestClient(TestServer(ViewServer(places, token="secret").app())) as client:
            found = []
            for address in addresses:
                if callable(address):
                    address()
                    continue
                response = await client.get(f"/{token}/{address}")
                body = await response.read()
                kind = response.headers["Content-Type"]
                found.append((response.status, response.headers, json.loads(body) if "json" in kind else body))
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize("token", ["wrong", "secre", "secret2", "sécret"])
def test_without_the_token_nothing_is_answered(tmp_path, token):
    make_run(tmp_path / "a")
    for address in ("", "api/runs", "static/main.js", "nothing"):
        assert asked([tmp_path], address, token=token)[0][0] == 403


def test_the_page_runs_only_its_own_scripts_and_loads_nothing_from_elsewhere(tmp_path):
    (status, headers, body), *_ = asked([tmp_path], "")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    for name, content in static_files().items():
        text = content.decode()
        if name not in ("uplot.js", "icon.svg"):
            assert "http://" not in text, name
            assert "https://" not in text, name
        assert "innerHTML" not in text, name
        assert "eval(" not in text, name
    assert b"<script>" not in body
    assert asked([tmp_path], "static/main.js")[0][1]["Content-Type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize(
    "address",
    [
        "static/..%2Fserver.py",
        "static/%2e%2e/server.py",
        "static/uplot-LICENSE.txt",
        "api/image?run=a&name=../config.yaml",
        "api/image?run=a&name=..%2Fconfig.yaml",
        "api/image?run=../outside&name=00000000.png",
        "api/new?run=../outside",
        "api/group?run=a&step=1&prompt=99",
        "api/tokens?run=a&step=1&prompt=0&sample=0",
        "../outside/config.yaml",
    ],
)
def test_no_address_leads_out_of_the_runs(tmp_path, address):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "outside")
    assert asked([tmp_path / "runs"], address)[0][0] in (403, 404)


def test_runs_are_found_as_they_appear_and_keep_their_names(tmp_path):
    make_run(tmp_path / "one")
    (_, _, before), (_, _, after) = asked(
        [tmp_path], "api/runs", lambda: make_run(tmp_path / "sweep" / "two", steps=5), "api/runs"
    )
    assert [run["name"] for run in before] == ["one"]
    assert [(run["name"], run["step"]) for run in after] == [("one", 3), ("sweep/two", 5)]
    assert after[0]["status"] == "running"
    assert after[0]["model"] == "org/small"


def test_a_run_that_is_named_twice_is_shown_once_and_equal_names_are_told_apart(tmp_path):
    make_run(tmp_path / "x" / "run")
    make_run(tmp_path / "y" / "run")
    places = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "x"]
    assert [run["name"] for run in asked(places, "api/runs")[0][2]] == ["run", "run (2)"]


def test_only_new_records_are_sent_and_a_resumed_run_sends_all_again(tmp_path):
    run = make_run(tmp_path / "a", steps=2)
    cursors = []

    def new():
        return f"api/new?run=a&since={cursors[-1] if cursors else ''}"

    async def ask():
        async with TestClient(TestServer(ViewServer([tmp_path], token="secret").app())) as client:
            answers = []
            for records in ((), (metrics(3, loss=0.5),), (), (metrics(2, reward=9.0),)):
                append(run.metrics, *records)
                body = await (await client.get(f"/secret/{new()}")).json()
                cursors.append(body["cursor"])
                answers.append((body["whole"], body["train"]["step"], body["train"]["values"].get("reward")))
            with run.metrics.open("a") as file:
                file.write('{"step": 3, "kind": "tra')
            answers.append((await (await client.get(f"/secret/{new()}")).json())["train"]["step"])
            return answers

    assert asyncio.run(ask()) == [
        (True, [1, 2], [0.1, 0.2]),
        (False, [3], [0.3]),
        (False, [], None),
        (True, [1, 2], [0.1, 9.0]),
        [],
    ]


def test_events_are_the_marks_of_the_curves(tmp_path):
    run = make_run(tmp_path / "a", steps=2, ckpt={"save_steps": 2})
    append(
        run.metrics,
        metrics(3, kl=float("nan"), **{"perf/max_tokens_per_gpu": 4096, "rollout/engines_replaced": 1}),
        {"step": 3, "kind": "eval", "time": 7.0, "eval_x_pass1": 0.5},
    )
    append(run.warnings, {"step": 1, "kind": "equal groups", "text": "nothing to learn"})
    append(run.notes, {"step": 2, "kind": "start", "clock": 1.0, "text": "rl"})
    events = asked([tmp_path], "api/new?run=a")[0][2]["events"]
    found = [(event["step"], event["kind"]) for event in events["events"]]
    assert sorted(found) == sorted(
        [
            (0, "start"),
            (1, "warning"),
            (2, "restart"),
            (2, "checkpoint"),
            (3, "engine"),
            (3, "memory"),
            (3, "numbers"),
            (3, "evaluation"),
        ]
    )
    again = asked([tmp_path], f"api/new?run=a&events={events['version']}")[0][2]
    assert "events" not in again


def test_rollouts_are_searched_and_a_wrong_query_is_answered_in_words(tmp_path):
    run = make_run(tmp_path / "a")
    append(run.rollouts, rollout(4, 3, 0, outcome="failed", error="Traceback: boom", reward=None))
    (_, _, hits), (_, _, placed), (status, _, wrong) = asked(
        [tmp_path],
        "api/groups?run=a&q=is:failed%20boom",
        "api/groups?run=a&count=2&step=1&prompt=1",
        "api/groups?run=a&q=step:x",
    )
    assert [(row["step"], row["prompt"], row["outcomes"]) for row in hits["rows"]] == [(4, 3, ["failed"])]
    assert placed["place"] == 6
    assert (1, 1) in [(row["step"], row["prompt"]) for row in placed["rows"]]
    assert status == 422
    assert "step:3-8" in wrong["detail"]


def test_tokens_have_texts_and_every_column(tmp_path):
    run = make_run(tmp_path / "a", steps=0, groups=0)
    write_tokens(run, 1, ["two ", "words", "a", "b", "c"], ordinal=5)
    (_, _, group), (_, _, sample) = asked(
        [tmp_path], "api/group?run=a&step=1&prompt=5", "api/tokens?run=a&step=1&prompt=5&sample=1"
    )
    assert [one["has_tokens"] for one in group["samples"]] == [True, True]
    assert group["label"] == "the label"
    segment = sample["segments"][0]
    assert segment["texts"] == ["two ", "words", "a", "b", "c"]
    assert segment["action"] == [0, 0, 1, 1, 1]
    assert segment["columns"]["advantages"] == [None, None, -1.0, 0.0, 1.0]
    assert segment["columns"]["logprobs"] == [None, None, -0.5, -1.0, -1.5]
    assert segment["columns"]["gap"] == [None, None, 0.0, 0.0, -0.25]
    assert segment["columns"]["ratio"] == [None, None, 1.0, 1.0, 1.0]
    assert segment["columns"]["versions"] == [-1, -1, 0, 0, 0]


def test_where_all_groups_are_logged_all_are_listed_and_a_resumed_run_loses_its_later_steps(tmp_path):
    run = make_run(tmp_path / "a", steps=0, groups=0, logger={"rollouts_per_step": -1})
    for step in (1, 2):
        write_tokens(run, step, ["two ", "words", "a", "b"], ordinal=5)
    run.rollouts.unlink()
    last = run.path / "tokens" / "step_000002.npz"
    (_, _, both), (_, _, found), (_, _, group), (_, _, one) = asked(
        [tmp_path],
        "api/groups?run=a",
        "api/groups?run=a&q=wordsab%20reward:1",
        "api/group?run=a&step=1&prompt=5",
        last.unlink,
        "api/groups?run=a",
    )
    assert [(row["step"], row["rewards"]) for row in both["rows"]] == [(2, [0.0, 1.0]), (1, [0.0, 1.0])]
    assert both["rows"][0]["reward"] == 0.5
    assert (both["done"], both["size"]) == (2, 2)
    assert found["groups"] == 0  # the response does not repeat the prompt
    assert [sample["length"] for sample in group["samples"]] == [2, 2]
    assert [row["step"] for row in one["rows"]] == [1]


def test_a_thumbnail_is_sent_and_no_other_file_of_the_folder(tmp_path):
    run = make_run(tmp_path / "a")
    folder = run.path / "rollout_images"
    folder.mkdir()
    png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (8).to_bytes(4, "big") * 2 + b"rest"
    (folder / "00ff00ff.png").write_bytes(png)
    (folder / "00ff00ee.png").write_bytes(b"<script>no picture</script>")
    (folder / "notes.txt").write_text("secret")
    image, broken, other = asked(
        [tmp_path], *(f"api/image?run=a&name={name}" for name in ("00ff00ff.png", "00ff00ee.png", "notes.txt"))
    )
    assert (image[0], image[1]["Content-Type"], image[2]) == (200, "image/png", png)
    assert (broken[0], other[0]) == (404, 404)


def test_the_settings_of_a_run(tmp_path):
    make_run(tmp_path / "a", ckpt={"save_steps": 7})
    settings = asked([tmp_path], "api/settings?run=a")[0][2]
    assert settings["all"]["ckpt.save_steps"] == "7"
    assert settings["set"]["ckpt.save_steps"] == "7"


def test_names_of_the_catalog_are_patterns():
    assert name_pattern("memory/peak_<phase>_gb") == r"memory/peak_.*_gb"
    assert name_pattern("eval gpt_loss").replace("\\", "") == "eval gpt_loss"


def test_the_command_names_a_folder_that_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert view.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert view.main([]) == 1
    assert "openrlhf view RUN" in capsys.readouterr().err
    assert "view" in COMMANDS


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(tmp_path, capsys):
    make_run(tmp_path / "a")
    with view._listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert view.main([str(tmp_path), "--port", str(port)]) == 1
    assert f"--port {port}" in capsys.readouterr().err
