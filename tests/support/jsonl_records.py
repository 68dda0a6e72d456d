"""Records of a JSON-lines file, as a run reads them."""

import json

from openrlhf.data.sources import load_records


def written(folder, records, *, name="train.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_records(str(path), flag="--data.dataset")
