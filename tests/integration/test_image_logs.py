"""What a run with images leaves: its log names the thumbnails, its page shows them, its model reads images."""

import json

import pytest
from PIL import Image
from vision_models import image, write_vision_model

from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_tokenizer

AGENT = """
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        return {
            "rewards": len(states["action_text"]) % 3,
            "environment_feedback": "so <image>?",
            "environment_images": [Image.new("RGB", (16, 16), (100 * self.turn, 0, 0))],
            "done": self.turn == 2,
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture
def seeing(tmp_path):
    """A model, prompts with an image each, and an agent that shows another one."""
    model = write_vision_model("qwen2_5_vl", tmp_path / "model")
    records = []
    for number in range(8):
        image(number).save(tmp_path / f"{number}.png")
        records.append({"input": "what is <image>?", "images": f"{number}.png", "label": str(number)})
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "agent.py").write_text(AGENT)
    return model, {
        "actor__model_name_or_path": str(model),
        "data__prompt_dataset": str(data),
        "data__max_images_per_prompt": 1,
        "data__max_len": 128,
        "rollout__max_new_tokens": 4,
        "reward__remote_url": "none",
        "train__agent_func_path": str(tmp_path / "agent.py"),
    }


def test_a_run_shows_what_its_policy_saw(cli, seeing):
    model, flags = seeing
    ran = cli(**flags)
    assert ran.rc == 0, ran.err
    records = [json.loads(line) for line in (ran.run_dir / "rollouts.jsonl").read_text().splitlines()]
    named = set()
    for record in records:
        read = [turn for turn in record["turns"] if turn["tokens"] and not turn["action"]]
        assert len(read) == 2
        for number, turn in enumerate(read, start=1):
            (shown,) = turn["images"]
            assert shown["number"] == number
            assert turn["text"].startswith(f"[image {number}: {shown['tokens']} tokens]", shown["at"])
            with Image.open(ran.run_dir / shown["file"]) as thumbnail:
                assert list(thumbnail.size) == shown["size"] == [[24, 16], [16, 16]][number - 1]
            named.add(shown["file"])
    assert named == {str(path.relative_to(ran.run_dir)) for path in (ran.run_dir / "rollout_images").iterdir()}
    assert len(named) == len({record["prompt_ordinal"] for record in records}) + 1
    page = (ran.run_dir / "report.html").read_text()
    assert page.count("<image ") == len(named)
    assert 'aria-label="image 2, 16 × 16 pixels' in page
    before, after = (ImageProcessor.load(folder, load_tokenizer(folder)) for folder in (model, ran.run_dir / "model"))
    assert before.prepare(image(9)).digest == after.prepare(image(9)).digest
