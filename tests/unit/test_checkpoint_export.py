"""Exports of image-text models: the folder reads images as the model that it came from."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from small_sections import loading
from transformers import AutoModelForImageTextToText
from vision_models import KINDS, image, write_vision_model

from openrlhf.checkpoint.export import export_policy, export_value_model
from openrlhf.cli.lora_combiner import main as combine
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import merged
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_policy, load_tokenizer, load_value_model


@pytest.fixture(scope="module", params=sorted(KINDS))
def folder(request, tmp_path_factory) -> Path:
    return write_vision_model(request.param, tmp_path_factory.mktemp(request.param))


def digests(folder: Path) -> list[str]:
    """Of two images, as the processor in this folder prepares them, with the tokens that stand for them."""
    processor = ImageProcessor.load(folder, load_tokenizer(folder))
    assert processor is not None
    return [processor.prepare(image(seed, width=40, height=24)).digest for seed in (1, 2)]


def test_a_policys_folder_reads_images_as_before(folder, tmp_path):
    """And its weights are those of an image-text model, the tower among them."""
    out = export_policy(load_policy(folder, loading()), load_tokenizer(folder), tmp_path / "out")
    assert digests(out) == digests(folder)
    before, after = (AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (folder, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_value_models_folder_too(folder, tmp_path):
    out = export_value_model(load_value_model(folder, loading()), load_tokenizer(folder), tmp_path / "out")
    assert digests(out) == digests(folder)
    assert load_value_model(out, loading(), fresh_head=False).head.weight.shape[0] == 1


def test_an_adapter_and_what_it_is_merged_into(folder, tmp_path):
    """Every weight is the trained one, those of the tower too, where other modules have names that end in the same."""
    policy = load_policy(folder, loading(lora=LoraSection(rank=2, alpha=4)))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape))
    adapter = export_policy(policy, load_tokenizer(folder), tmp_path / "adapter")
    stored = "preprocessor_config.json"
    assert (adapter / stored).read_text() == (folder / stored).read_text()
    words = ["--model_path", str(folder), "--lora_path", str(adapter), "--output_path", str(tmp_path / "merged")]
    assert combine(words) == 0
    assert digests(tmp_path / "merged") == digests(folder)
    trained = dict(merged(policy.model, policy.model.state_dict().items()))
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").state_dict()
    assert trained.keys() == written.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(written[name], tensor)


def test_every_file_of_a_processor_comes_along_and_no_other(folder, tmp_path):
    """The tokenizer's chat template is the one that was trained with; a processor's own is kept where it has none."""
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    (base / "video_preprocessor_config.json").write_text('{"fps": 2}')
    (base / "chat_template.json").write_text('{"chat_template": "an older one"}')
    (base / "notes.txt").write_text("mine")
    policy, tokenizer = load_policy(base, loading()), load_tokenizer(base)
    out = export_policy(policy, tokenizer, tmp_path / "out")
    assert json.loads((out / "video_preprocessor_config.json").read_text()) == {"fps": 2}
    assert (out / "chat_template.jinja").read_text() == tokenizer.chat_template
    assert not (out / "chat_template.json").exists()
    assert not (out / "notes.txt").exists()
    tokenizer.chat_template = None
    out = export_policy(policy, tokenizer, tmp_path / "without")
    assert json.loads((out / "chat_template.json").read_text()) == {"chat_template": "an older one"}


def test_a_model_whose_folder_is_gone_is_written_all_the_same(folder, tmp_path, caplog):
    """It was days of training; what is missing can be copied."""
    shutil.copytree(folder, tmp_path / "base")
    policy = load_policy(tmp_path / "base", loading())
    shutil.rmtree(tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        out = export_policy(policy, None, tmp_path / "out")
    assert (out / "model.safetensors").exists()
    assert "base: the files of its image processor are not there any more" in caplog.text
