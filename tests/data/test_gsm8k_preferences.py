from __future__ import annotations

import json
import random
from pathlib import Path

from isotrain.data.preference import read_pair, read_responses, read_steps
from isotrain.data.prepare.gsm8k import corrupt, prepare_gsm8k_preferences
from isotrain.data.rows import Row

STEPS = ["In May 48/2 = <<48/2=24>>24 clips.", "No sum here.", "In all 48+24 = <<48+24=72>>72 clips."]


def test_one_number_is_wrong_and_can_be_seen_to_be() -> None:
    seen = set()
    for seed in range(40):
        made = corrupt(STEPS, random.Random(seed))
        assert made is not None
        changed, number = made
        seen.add(number)
        assert [step for i, step in enumerate(changed) if i != number] == [
            step for i, step in enumerate(STEPS) if i != number
        ]
        mark, right = ("<<48/2=24>>", "24") if number == 0 else ("<<48+24=72>>", "72")
        written = changed[number].split(mark)[1].split(" ")[0]
        assert written.isdigit() and written != right
    assert seen == {0, 2}
    assert corrupt(["no marks", "at all"], random.Random(0)) is None


def test_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        solution = "\n".join(STEPS) + "\n#### 72"
        lines = [{"question": f"How many {i}?", "answer": solution} for i in range(40)]
        lines.append({"question": "No marks?", "answer": "none\n#### 3"})
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = prepare_gsm8k_preferences(tmp_path, tmp_path / "out")
    assert written == {
        f"{name}-{split}.jsonl": 40 for split in ("train", "test") for name in ("pairs", "responses", "steps")
    }

    def rows(name: str) -> list[Row]:
        text = (tmp_path / "out" / f"{name}-train.jsonl").read_text()
        return [Row(json.loads(line), "x") for line in text.splitlines()]

    for row in rows("pairs"):
        pair = read_pair(row)
        assert pair.chosen.values["completion"][0]["content"] == "\n".join(STEPS)
        assert pair.rejected.values["completion"][0]["content"] != "\n".join(STEPS)
    preference = [answer for row in rows("responses") for answer in read_responses(row)]
    right = ["\n".join(STEPS) == answer.response.values["completion"][0]["content"] for answer in preference]
    assert right == [answer.desirable for answer in preference] and 8 < sum(right) < 32
    wrong = [read_steps(row).labels.count(0.0) for row in rows("steps")]
    assert set(wrong) == {0, 1} and 20 < sum(wrong) < 39
    before = (tmp_path / "out" / "pairs-train.jsonl").read_text()
    prepare_gsm8k_preferences(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "pairs-train.jsonl").read_text() == before
