"""What users get wrong: each case ends soon, non-zero, in one line that names the file, record or flag to change."""

import io
import json
import os
import shutil

import pytest
from patience import patience
from vision_models import image, png_that_says, write_vision_model

GOOD = '{"input": "1+2=", "label": "3"}\n'


def refused(ran, *parts, rc=1, seconds=10.0):
    """One clean line of error with all `parts` in it, and nothing on stdout."""
    assert ran.rc == rc, ran.err
    assert len(ran.errors) == 1, ran.err
    for part in parts:
        assert str(part) in ran.errors[0]
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert ran.seconds < patience(seconds)


def succeeded(ran):
    assert ran.rc == 0, ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert (ran.run_dir / "report.html").is_file()
    assert (ran.run_dir / "model" / "config.json").is_file()


# ---------------------------------------------------------------------------------------------- data


def test_a_metric_that_evaluations_will_not_have_is_found_before_the_first_step(cli, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(GOOD.replace("{", '{"datasource": "sums", ', 1))
    ran = cli(eval__dataset=held_out, eval__steps=1, ckpt__best_metric_key="eval_sum_pass1")
    refused(ran, "--ckpt.best_metric_key eval_sum_pass1", "did you mean eval_sums_pass1?", rc=2)
    assert not ran.run_dir.exists()


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("bad.jsonl", GOOD + GOOD + '{"input": "1+\n' + GOOD, ["bad.jsonl, line 3 is not JSON"]),
        ("list.jsonl", GOOD + GOOD + "[1, 2]\n", ["list.jsonl, line 3 is a list, not an object"]),
        ("empty.jsonl", "", ["empty.jsonl is empty"]),
        ("blank.jsonl", "\n\n", ["blank.jsonl is empty"]),
        ("binary.jsonl", "\x00\x01\x1b[2J\x07", ["binary.jsonl, line 1 is not JSON"]),
        ("notes.txt", "hello", ["--data.prompt_dataset", "notes.txt", "give a .jsonl"]),
        ("number.jsonl", '{"input": 5, "label": "3"}\n', ["record 1 of number.jsonl", "must be a string", "got int"]),
        ("nothing.jsonl", '{"input": " ", "label": "3"}\n' * 2, ["no usable prompt in 2 records: 2 are empty"]),
        ("half.jsonl", GOOD + '{"input": "1+\\ud83d", "label": "3"}\n', ["half.jsonl, line 2 has half a character"]),
    ],
)
def test_unusable_data(cli, tmp_path, name, text, parts):
    path = tmp_path / name
    path.write_text(text)
    ran = cli(data__prompt_dataset=path)
    refused(ran, *parts)
    assert all(c.isprintable() or c.isspace() for c in ran.err)  # terminals stay sane
    assert not ran.run_dir.exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"data__prompt_dataset": "nope.jsonl"}, ["--data.prompt_dataset: there is no file nope.jsonl", "looked in"]),
        ({"eval__dataset": "nope.jsonl"}, ["--eval.dataset: there is no file nope.jsonl"]),
        ({"data__input_key": "question"}, ["record 1 of train.jsonl", "set --data.input_key to one of input, label"]),
        ({"data__label_key": "answer"}, ["record 1 of train.jsonl", "set --data.label_key to one of input, label"]),
        ({"data__prompt_dataset": "org/nope"}, ["org/nope", "the Hub cannot be reached", "download it first"]),
        ({"data__apply_chat_template": True}, ["no chat template", "--data.apply_chat_template"]),
    ],
)
def test_data_flags_that_do_not_fit(cli, monkeypatch, overrides, parts):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(cli(**overrides), *parts)


def test_probabilities_that_do_not_fit(cli, inputs):
    both = f"{inputs.data},{inputs.data}"
    refused(cli(data__prompt_dataset=both, data__prompt_probs="1.0"), "--data.prompt_probs", "2 datasets", rc=2)
    refused(cli(data__prompt_dataset=both, data__prompt_probs="0.5,0.6"), "--data.prompt_probs", "add up to 1", rc=2)


def test_unknown_split(cli, inputs, tmp_path):
    import datasets

    rows = datasets.Dataset.from_list(inputs.records)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    ran = cli(data__prompt_dataset=tmp_path / "saved", data__prompt_split="validation")
    refused(ran, "no split 'validation'", "set --data.prompt_split to one of train, test")


def test_prompts_that_cannot_be_used_are_counted_and_left_out(cli, tmp_path):
    """4 usable prompts of 7: one round. The last has 15 tokens, and 16 − 4 leave room for 12."""
    lines = [GOOD] * 4 + [
        '{"input": "", "label": "3"}\n',
        '{"input": null, "label": "3"}\n',
        '{"input": "1111111+111111=", "label": "3"}\n',
    ]
    (tmp_path / "some.jsonl").write_text("".join(lines))
    ran = cli(data__prompt_dataset="some.jsonl", data__long_prompts="skip")
    succeeded(ran)
    assert "left out 2 of 7 prompts, which have an empty 'input': record 5 of some.jsonl, record 6" in ran.err
    assert "left out 1 of 7 prompts, which are longer than 12 tokens: record 7 of some.jsonl" in ran.err
    assert len(ran.metrics) == 1


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision_model"))


def broken_png():
    whole = io.BytesIO()
    image(1, width=64, height=64).save(whole, "PNG")
    return whole.getvalue()[:-3000]


@pytest.mark.parametrize(
    ("record", "content", "message"),
    [
        ({}, None, "image 1 of 1: there is no image file cat.png (looked in"),
        ({}, broken_png(), "cat.png is truncated or broken"),
        ({}, png_that_says(30_000, 30_000), "is a decompression bomb, or far too large"),
        ({}, png_that_says(0, 0), "has 0 × 0 pixels"),
        ({"images": ["cat.png"] * 3}, b"", "it has 3 images, and --data.max_images_per_prompt is 2: raise it"),
        ({"input": "<image><image>"}, b"", "it has 2 times <image>, and 1 images under 'images': give one for each"),
        ({"input": "<|image_pad|>", "images": []}, b"", "its text has <|image_pad|>, which stands for an image"),
        (
            {"images": ["http://127.0.0.1:9/cat.png"]},
            b"",
            "is a URL: --data.allow_image_urls lets the run fetch images",
        ),
    ],
)
def test_unusable_images(cli, tmp_path, vision_model, record, content, message):
    (tmp_path / "images.jsonl").write_text(
        GOOD + json.dumps({"input": "1", "images": ["cat.png"], "label": 3} | record)
    )
    if content is not None:
        (tmp_path / "cat.png").write_bytes(content)
    ran = cli(
        actor__model_name_or_path=vision_model, data__prompt_dataset="images.jsonl", data__max_images_per_prompt=2
    )
    refused(ran, "--data.prompt_dataset, record 2 of images.jsonl: ", message)
    assert not ran.run_dir.exists()


def test_images_for_a_model_without_a_tower(cli, inputs):
    ran = cli(data__max_images_per_prompt=1)
    refused(ran, "--actor.model_name_or_path", "this model reads no images", "leave the flag out")


def test_an_image_that_is_found_broken_later_fails_its_own_prompt(cli, tmp_path, vision_model, monkeypatch):
    """The beginning of the file is whole, so that the start of the run finds nothing."""
    monkeypatch.setattr("openrlhf.data.prompts.DECODED", 0)
    for number in range(3):
        image(number).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(broken_png())
    records = [{"input": "1+<image>", "images": f"{number}.png", "label": "3"} for number in range(4)]
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ran = cli(
        actor__model_name_or_path=vision_model,
        data__prompt_dataset="images.jsonl",
        data__max_images_per_prompt=1,
        data__max_len=100,
        train__total_steps=1,
    )
    succeeded(ran)
    assert "record 4 of images.jsonl" in ran.err
    assert "3.png is truncated or broken" in ran.err
    assert ran.metrics[0]["rollout/failed"] == 2, "both samples of the prompt, and no other"


def test_a_template_variables_for_it_and_texts_that_end_a_response(cli, inputs):
    """The template repeats the prompt's first character, and every digit ends a response."""
    ran = cli(
        *("--rollout.stop", *"0123456789"),
        data__apply_chat_template=True,
        data__tokenizer_chat_template="{{ messages[0].content[:times] }}{{ messages[0].content }}",
        data__chat_template_kwargs='{"times": 1}',
        train__total_steps=1,
    )
    succeeded(ran)
    assert len(ran.metrics) == 1
    prompts = {record["input"][0] + record["input"] for record in inputs.records}
    rollouts = [json.loads(line) for line in (ran.run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts
    texts = [json.dumps(rollout) for rollout in rollouts]
    assert all(any(prompt in text for prompt in prompts) for text in texts)
    assert 1 <= ran.metrics[0]["response_length"] < 4, "the untrained model writes a digit sooner than four others"
    assert ran.metrics[0]["truncated"] < 1


def test_prompts_that_are_too_long_are_cut_from_the_left(cli, tmp_path):
    """Records as TRL has them, one without a label. 15 tokens, of which 12 leave room for 4 more."""
    lines = ['{"prompt": "1111111+111111=", "label": "3"}\n'] * 3 + ['{"prompt": "1+2=", "label": null}\n']
    (tmp_path / "long.jsonl").write_text("".join(lines))
    ran = cli(data__prompt_dataset="long.jsonl")
    succeeded(ran)
    assert "3 of 4 prompts are longer than 12 tokens and lose their beginning" in ran.err
    assert "1 of 4 records have no 'label'" in ran.err
    (record,) = ran.metrics
    assert record["rollout/failed"] == 0
    assert record["total_length"] <= 16


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "folder", "split of a file"])
def test_every_kind_of_file_trains(cli, inputs, tmp_path, kind):
    import datasets

    rows, path = datasets.Dataset.from_list(inputs.records[:4]), tmp_path / f"data.{kind}"
    options = {}
    if kind == "csv":
        # Integers in a table are labels as well; an empty cell is an empty prompt.
        path.write_text("input,label\n1+2=,3\n,4\n2+2=,4\n3+3=,6\n1+1=,2\n")
    elif kind == "json":
        path.write_text(json.dumps(inputs.records[:4]))
    elif kind == "parquet":
        rows.to_parquet(path)
    elif kind == "folder":
        rows.save_to_disk(str(path))
    else:
        path, options = inputs.data, {"data__prompt_split": "validation", "data__max_samples": 4}
    ran = cli(data__prompt_dataset=path, **options)
    succeeded(ran)
    assert len(ran.metrics) == 1
    if kind == "csv":
        assert "left out 1 of 5 prompts" in ran.err
    if options:
        assert "--data.prompt_split validation does nothing for train.jsonl, which is one file" in ran.err


# ---------------------------------------------------------------------------------------------- models


def _broken(inputs, folder, name):
    """A copy of the model with one thing wrong."""
    shutil.copytree(inputs.model, folder)
    weights = folder / "model.safetensors"
    if name == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif name == "half a configuration":
        (folder / "config.json").write_text('{"model_type": ')
    elif name == "unknown type":
        (folder / "config.json").write_text('{"model_type": "nope"}')
    elif name == "no weights":
        weights.unlink()
    elif name == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif name == "other shapes":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 80}))
    elif name == "no configuration":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("no tokenizer", "cannot load the tokenizer"),
        ("half a configuration", "not a valid JSON file"),
        ("unknown type", "model type `nope`"),
        ("no weights", "cannot load the model"),
        ("half the weights", "cannot load the model"),
        ("other shapes", "cannot load the model"),
        ("no configuration", "no config.json"),
    ],
)
def test_folders_that_are_no_model(cli, inputs, tmp_path, name, part):
    _broken(inputs, tmp_path / "broken", name)
    ran = cli(actor__model_name_or_path=tmp_path / "broken")
    refused(ran, "--actor.model_name_or_path", tmp_path / "broken", part)
    assert not ran.run_dir.exists()


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "nomodel", "org/nomodel"])
def test_models_that_are_not_there(cli, monkeypatch, path):
    """A Hub name is not retried for half a minute when the Hub cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(cli(actor__model_name_or_path=path), f"--actor.model_name_or_path {path}: ", "no such folder")


def test_more_positions_than_the_model_knows(cli):
    ran = cli(data__max_len=65, data__max_samples=4)
    succeeded(ran)
    assert "--data.max_len 65 is more than the 64 positions the model was made for" in ran.err


# ---------------------------------------------------------------------------------------------- rewards


@pytest.fixture
def reward(tmp_path):
    """A reward file; the source begins at line 2."""

    def write(source):
        path = tmp_path / "reward.py"
        path.write_text(f"import os, time\n{source}\n")
        return path

    return write


def function(body):
    return f"def reward_func(queries, prompts, labels):\n    n = len(queries)\n    {body}"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("def reward_func(:", ["reward.py:2: SyntaxError"]),
        ("def judge(a): ...", ["reward.py defines no function reward_func", "it has judge"]),
        ("import no_such_module", ["reward.py:2: ModuleNotFoundError: No module named 'no_such_module'"]),
    ],
)
def test_reward_files_that_cannot_be_loaded(cli, reward, source, parts):
    ran = cli(reward__remote_url=reward(source))
    refused(ran, "--reward.remote_url", *parts)
    assert not ran.run_dir.exists()


def test_reward_file_that_is_not_there(cli):
    refused(cli(reward__remote_url="nope.py"), "--reward.remote_url: there is no file", "nope.py")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise KeyError('x')", "reward.py:4 (in reward_func): KeyError: 'x'"),
        ("raise ValueError('one\\ntwo\\n' * 1000)", "ValueError: one two"),
        ("return [1.0] * (n - 1)", "its rewards has 1 values for 2 samples"),
        ("return [1.0] * (n + 1)", "its rewards has 3 values for 2 samples"),
        ("return [float('nan')] * n", "its rewards[0] must be finite, got nan"),
        ("return None", "it returned None: is a `return` missing?"),
        ("return ['1'] * n", "its rewards[0] must be one number, got '1' (str)"),
        ("os._exit(3)", "the process ended with exit code 3"),
    ],
)
def test_rewards_that_always_fail_end_the_run(cli, reward, body, part):
    """Three failures before the first success are enough; the run directory stays readable."""
    ran = cli(reward__remote_url=reward(function(body)))
    refused(ran, "reward calls all failed", "of train.jsonl", part)
    assert len(ran.errors[0]) < 1000
    assert ran.metrics == []
    assert (ran.run_dir / "config.yaml").is_file()
    assert "failed</span>" in (ran.run_dir / "report.html").read_text()


def test_rewards_that_always_hang_end_the_run(cli, reward):
    ran = cli(reward__remote_url=reward(function("time.sleep(600)")), reward__timeout=2)
    refused(ran, "did not answer in 2 s (--reward.timeout)", seconds=12.0)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("time.sleep(600)", "did not answer in 1 s (--reward.timeout)"),
        ("os._exit(3)", "ended with exit code 3"),
        ("return [float('nan')] * n", "must be finite"),
    ],
)
def test_a_record_that_cannot_be_judged_is_counted_and_left_out(cli, inputs, reward, body, part):
    """Record 1 fails with its 2 samples; the other 7 are judged."""
    source = function(f"if prompts[0] == {inputs.first_prompt!r}:\n        {body}\n    return [1.0] * n")
    ran = cli(reward__remote_url=reward(source), reward__timeout=1)
    succeeded(ran)
    assert sum(record["rollout/failed"] for record in ran.metrics) == 2
    assert sum(record["rollout/num_samples"] for record in ran.metrics) == 14
    assert "reward failed: record 1 of train.jsonl: " in ran.err
    assert part in ran.err


def test_a_reward_that_breaks_down_later_leaves_what_was_trained(cli, reward):
    """The first round's 4 calls succeed, the second round's fail."""
    source = "calls = 0\n" + function(
        "global calls\n    calls += 1\n    if calls > 4: raise ValueError('gone')\n    return [1.0] * n"
    )
    ran = cli(reward__remote_url=reward(source))
    refused(ran, "all 4 groups of a round failed", "ValueError: gone")
    assert [record["step"] for record in ran.metrics] == [1]
    assert "failed</span>" in (ran.run_dir / "report.html").read_text()


@pytest.mark.parametrize(
    "source",
    [
        function("return __import__('torch').ones(n)"),
        function("return __import__('numpy').ones(n, dtype='int32')"),
        function("return [True] * n"),
        function("return {'rewards': [1] * n, 'scores': [1] * n, 'extra_logs': {'length': [5] * n}}"),
        function("return 1"),
        "def reward_func(queries, **kwargs):\n    return [1.0] * len(kwargs['labels'])",
        "async def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)",
        function("print('x' * 100_000)\n    return [1.0] * n"),
    ],
    ids=["tensor", "array", "bools", "dict of ints", "one number", "kwargs", "async", "prints"],
)
def test_rewards_of_every_form_train(cli, reward, source):
    ran = cli(reward__remote_url=reward(source), data__max_samples=4)
    succeeded(ran)
    (record,) = ran.metrics
    assert record["reward"] == 1.0
    assert record["rollout/failed"] == 0


# ---------------------------------------------------------------------------------------------- flags and folders


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"rollout__bach_size": 4}, ["--rollout.bach_size is unknown; did you mean --rollout.batch_size?"]),
        ({"train__batch_size": "many"}, ["--train.batch_size: expected a whole number, got 'many'"]),
        ({"train__batch_size": 9}, ["--train.batch_size 9 is more than a round has", "Make it 8 or less"]),
        ({"rollout__max_new_tokens": 16}, ["--rollout.max_new_tokens 16 leaves no room", "--data.max_len 16"]),
        (
            {"actor__dual_clip": 3, "actor__policy_loss_type": "gspo"},
            ["--actor.dual_clip bounds", "leave one of them out"],
        ),
        ({"algo__kl__target": 0.1}, ["--algo.kl.target adapts", "give --algo.kl.init_coef a value above 0"]),
        (
            {"ds__ring_attn_size": 2, "train__launcher": "local"},
            ["--ds.ring_attn_size 2: --train.launcher local is one process", "use --train.launcher ray"],
        ),
        ({"config": "nope.yaml"}, ["--config nope.yaml: cannot be read"]),
    ],
)
def test_flags_that_cannot_run(cli, overrides, parts):
    ran = cli(**overrides)
    refused(ran, *parts, rc=2)
    assert not ran.run_dir.exists()


def test_a_flag_given_twice(cli):
    refused(cli("--train.seed", "1", "--train.seed", "2"), "--train.seed is given twice, as 1 and 2", rc=2)


@pytest.mark.parametrize("overrides", [{"algo__advantage__estimator": "gae"}, {"ds__ring_attn_size": 2}])
def test_what_could_run_can_be_printed_instead(cli, overrides, capfd):
    with pytest.raises(SystemExit) as ended:
        cli("--print_config", **overrides)
    assert ended.value.code == 0
    assert "estimator" in capfd.readouterr().out


def test_folders_that_cannot_be_written_are_refused_before_training(cli, inputs, tmp_path):
    """Above all, what a user names by mistake is not harmed."""
    before = inputs.data.read_text()
    refused(cli(ckpt__output_dir=inputs.data), f"--ckpt.output_dir {inputs.data}: this is a file", rc=2)
    refused(cli(logger__run_dir=inputs.data), f"--logger.run_dir {inputs.data}: this is a file", rc=2)
    refused(cli(ckpt__output_dir="/proc/nope/out"), "--ckpt.output_dir /proc/nope/out: cannot be written", rc=2)
    assert inputs.data.read_text() == before


def test_what_is_in_the_output_folder_stays(cli, tmp_path):
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    (tmp_path / "run" / "model").mkdir(parents=True)
    ran = cli(data__max_samples=4)
    assert ran.rc == 0
    assert sorted(os.listdir(tmp_path / "run" / "model")) == []
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "out" / "checkpoints").is_dir()
    assert (tmp_path / "out" / "config.json").is_file()


# ---------------------------------------------------------------------------------------------- as users start it


def test_as_a_process(run_cli, reward):
    """`openrlhf rl` from outside: exit status, and a stdout that not even the reward's prints reach."""
    source = function("print('judged')\n    return [1.0] * n")
    ran = run_cli(
        module="openrlhf.cli.main", before=("rl",), reward__remote_url=reward(source), data__max_samples=4, timeout=60
    )
    succeeded(ran)
    assert "judged" in ran.err
    assert "step 1/1" in ran.err


def test_as_a_process_that_is_refused(run_cli, reward):
    ran = run_cli(reward__remote_url=reward(function("time.sleep(600)")), reward__timeout=1)
    refused(ran, "did not answer in 1 s", seconds=60.0)
