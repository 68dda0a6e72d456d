"""What a run refuses before it begins: images for a model that reads none, a teacher with another vocabulary."""

import pytest
from vision_models import write_vision_model

from openrlhf.config.parser import parse
from openrlhf.demo.model import make_model, make_tokenizer
from openrlhf.models.loading import ModelLoadError
from openrlhf.runs.preflight import check_teacher, policy_images, policy_tokenizer


def images_of(folder, *flags):
    words = ["--actor.model_name_or_path", str(folder), "--algo.advantage.estimator", "rloo", *flags]
    config = parse("train_ppo_ray", words)
    return policy_images(config, policy_tokenizer(config))


def test_images_for_a_model_without_a_tower_are_refused_before_it_is_loaded(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    make_model(tokenizer, seed=0).config.save_pretrained(tmp_path)
    assert images_of(tmp_path) is None
    with pytest.raises(ModelLoadError, match=r"^--actor\.model_name_or_path /.*: this model reads no images"):
        images_of(tmp_path, "--data.max_images_per_prompt", "1")


def test_the_flags_of_images_arrive(tmp_path):
    write_vision_model("llava", tmp_path)
    assert images_of(tmp_path) is None
    flags = ["--data.max_images_per_prompt", "2", "--data.image_key", "pictures", "--data.allow_image_urls"]
    found = images_of(tmp_path, *flags)
    assert (found.places.most, found.places.key, found.places.allow_urls) == (2, "pictures", True)
    assert found.places.token == found.processor.image_token == "<image>"


def test_a_processor_that_cannot_be_loaded(tmp_path):
    write_vision_model("qwen2_5_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"^--actor\.model_name_or_path /.*: the image processor of qwen2_5_vl"):
        images_of(tmp_path, "--data.max_images_per_prompt", "1")


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        ("0123456789>", None),
        ("0123456798>", r"'8' is token 10 of the policy, and token 11 of the teacher"),
        ("012345678>", r"'9' is token 11 of the policy, and none of the teacher"),
        ("0123456789>x", r"it has 14 tokens, and the policy 13"),
    ],
)
def test_a_teacher_with_another_vocabulary_is_refused_before_it_is_loaded(tmp_path, characters, message):
    policy, teacher = make_tokenizer(), make_tokenizer(characters)
    teacher.save_pretrained(tmp_path)
    make_model(teacher, seed=0).config.save_pretrained(tmp_path)
    config = parse("train_ppo_ray", ["--teacher.model_name_or_path", str(tmp_path)])
    if message is None:
        check_teacher(config, policy)
        return
    with pytest.raises(ModelLoadError, match=rf"^--teacher\.model_name_or_path /.*: .*{message}\. Take a teacher"):
        check_teacher(config, policy)
