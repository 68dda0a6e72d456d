"""Where prompts, examples and pairs come from, and how they become text."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from openrlhf.config.fields import Flag


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    max_len: Annotated[
        int, Flag("longest sequence in tokens; in RL prompt and response together", flat="max_len", above=0)
    ] = 2048
    disable_fast_tokenizer: Annotated[bool, Flag("use the slow tokenizer", flat="disable_fast_tokenizer")] = False


@dataclass(frozen=True, kw_only=True)
class DataSection(TokenizerSection):
    max_samples: Annotated[
        int,
        Flag("take at most this many records, of the mixture; of evaluation data as well", flat="max_samples", above=0),
    ] = 1_000_000
    input_template: Annotated[
        str | None,
        Flag(
            "text around the prompt, with {} for it; chat templates replace it",
            flat="input_template",
            only_with="!model.pretrain_mode_enable !.apply_chat_template !plays_world",
        ),
    ] = None
    apply_chat_template: Annotated[
        bool, Flag("format with the tokenizer's chat template", flat="apply_chat_template")
    ] = False
    tokenizer_chat_template: Annotated[
        str | None,
        Flag(
            "Jinja text, or a file with it, that replaces the tokenizer's chat template", flat="tokenizer_chat_template"
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        Flag("JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'"),
    ] = None
    dataloader_num_workers: Annotated[
        int, Flag("processes that tokenise; 0 = chosen by the data's size", flat="dataloader_num_workers", at_least=0)
    ] = 0
    trust_remote_code: Annotated[bool, Flag("run Python code that comes with a dataset; off unless you trust it")] = (
        False
    )

    image_key: Annotated[str, Flag("record key of images", flat="image_key", only_with=".max_images_per_prompt")] = (
        "images"
    )
    max_images_per_prompt: Annotated[
        int, Flag("images a prompt or a record may have; > 0 turns vision on", flat="max_images_per_prompt", at_least=0)
    ] = 0
    allow_image_urls: Annotated[
        bool,
        Flag("fetch images that are http(s) URLs; off unless you trust the data", only_with=".max_images_per_prompt"),
    ] = False

    @property
    def template_arguments(self) -> dict[str, Any]:
        """`chat_template_kwargs` as values."""
        return json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}

    @property
    def prompt_template(self) -> str | None:
        """`input_template` where it is one: it contains `{}` and no chat template replaces it."""
        usable = self.input_template is not None and "{}" in self.input_template and not self.apply_chat_template
        return self.input_template if usable else None


def written(separator: str) -> str:
    """A separator of a flag as it stands in texts."""
    return separator.replace(r"\n", "\n").replace(r"\t", "\t")


@dataclass(frozen=True, kw_only=True)
class SupervisedDataSection(DataSection):
    dataset: Annotated[
        str | None,
        Flag("training data: comma list of files, patterns, folders, name[@folder], file://, hf://", flat="dataset"),
    ] = None
    dataset_probs: Annotated[
        str | None,
        Flag("comma list of mixing probabilities; unset: one after the other", flat="dataset_probs"),
    ] = None
    dataset_split: Annotated[str, Flag("split of the training data", flat="dataset_split train_split")] = "train"


@dataclass(frozen=True, kw_only=True)
class SFTDataSection(SupervisedDataSection):
    input_key: Annotated[str, Flag("record key of the prompt: text or messages", flat="input_key")] = "input"
    output_key: Annotated[str | None, Flag("record key of the answer; unset: the last message", flat="output_key")] = (
        None
    )
    multiturn: Annotated[
        bool,
        Flag(
            "loss on every assistant turn; needs apply_chat_template",
            flat="multiturn",
            only_with="!model.pretrain_mode_enable",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class PreferenceDataSection(SupervisedDataSection):
    prompt_key: Annotated[
        str | None, Flag("record key of the shared prompt; unset: inside the answers", flat="prompt_key")
    ] = None
    chosen_key: Annotated[
        str, Flag("record key of the preferred answer", flat="chosen_key", only_with="model.loss_type!=kto,prm")
    ] = "chosen"
    rejected_key: Annotated[
        str, Flag("record key of the other answer", flat="rejected_key", only_with="model.loss_type!=kto,prm")
    ] = "rejected"


@dataclass(frozen=True, kw_only=True)
class RMDataSection(PreferenceDataSection):
    steps_key: Annotated[
        str, Flag("record key of the list of an answer's steps (prm)", only_with="model.loss_type=prm")
    ] = "steps"
    labels_key: Annotated[
        str, Flag("record key of the list of which steps are good (prm)", only_with="model.loss_type=prm")
    ] = "labels"
    step_separator: Annotated[
        str, Flag("text between steps (prm); \\n is the end of a line", only_with="model.loss_type=prm")
    ] = r"\n\n"

    @property
    def separator(self) -> str:
        """`step_separator` as it stands in texts."""
        return written(self.step_separator)


@dataclass(frozen=True, kw_only=True)
class DPODataSection(PreferenceDataSection):
    response_key: Annotated[
        str, Flag("record key of the answer (kto)", flat="response_key", only_with="model.loss_type=kto")
    ] = "response"
    label_key: Annotated[
        str,
        Flag("record key of whether the answer is desirable (kto)", flat="label_key", only_with="model.loss_type=kto"),
    ] = "label"


@dataclass(frozen=True, kw_only=True)
class PromptDataSection(DataSection):
    prompt_dataset: Annotated[
        str | None,
        Flag(
            "prompts: comma list of files, patterns, folders, name[@folder], file://, hf://, openrlhf.worlds.NAME; "
            "unset: the records of the world that is played",
            flat="prompt_data",
        ),
    ] = None
    prompt_probs: Annotated[
        str | None, Flag("comma list of mixing probabilities; unset: one after the other", flat="prompt_data_probs")
    ] = None
    prompt_split: Annotated[str, Flag("split of the prompts", flat="prompt_split")] = "train"
    curriculum: Annotated[
        Literal["off", "success", "difficulty", "solved_last"],
        Flag("which prompts come next: any; those solved now and then; easy before hard; solved ones at a pass's end"),
    ] = "off"
    curriculum_explore: Annotated[
        float,
        Flag(
            "share of the curriculum's draws that are from all prompts alike",
            only_with=".curriculum=success,difficulty",
            within=(0, 1),
        ),
    ] = 0.1
    curriculum_half_life: Annotated[
        float | None,
        Flag(
            "rounds after which a result counts half in success rates; unset: 5 for difficulty, 50 for the others",
            only_with=".curriculum!=off",
            above=0,
        ),
    ] = None
    curriculum_threshold: Annotated[
        float,
        Flag(
            "success rate from which a level is mastered, or a prompt solved",
            only_with=".curriculum=difficulty,solved_last",
            above=0,
            within=(0, 1),
        ),
    ] = 0.8
    curriculum_score_range: Annotated[
        tuple[float, float],
        Flag("scores of failure and of success; those outside count as its ends", only_with=".curriculum!=off"),
    ] = (0.0, 1.0)
    difficulty_key: Annotated[
        str,
        Flag("record key of a prompt's difficulty, a number", only_with=".curriculum=difficulty"),
    ] = "difficulty"
    input_key: Annotated[str, Flag("record key of the prompt: text or messages", flat="input_key")] = "input"
    label_key: Annotated[
        str | None, Flag("record key of the ground truth given to rewards and agents", flat="label_key")
    ] = None
    long_prompts: Annotated[
        Literal["cut", "skip", "error"],
        Flag("prompts that leave no room for max_new_tokens lose their beginning, are left out, or end the run"),
    ] = "cut"
    dataloader_num_workers: Annotated[
        int,
        Flag(
            "accepted; prompts need no loading processes",
            flat="dataloader_num_workers",
            no_effect="prompts need no loading processes",
            at_least=0,
        ),
    ] = 0
