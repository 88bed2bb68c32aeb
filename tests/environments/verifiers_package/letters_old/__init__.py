"""The same environment for verifiers up to 0.3."""

import verifiers as vf
from datasets import Dataset

KINDS = {"digits": "0123456789", "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


def of_the_kind(completion, answer, **others):
    said = completion[-1]["content"]
    return sum(letter in KINDS[answer] for letter in said) / max(1, len(said))


async def said_twice(state, **others):
    return float(len(state["trajectory"]) == 2)


class Letters(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **others):
        return [{"role": "user", "content": "Again"}]


def load_environment(tasks: int = 4, compared: bool = False) -> vf.Environment:
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(tasks)]
    rows = {"question": [f"Say {kind}" for kind in kinds], "answer": kinds}
    rubric = vf.Rubric(funcs=[of_the_kind, said_twice], weights=[2.0, 0.5])
    if compared:
        rubric.add_reward_func(lambda states: [0.0 for _ in states])
    evaluated = Dataset.from_dict({"question": ["Say digits"], "answer": ["digits"]})
    return Letters(dataset=Dataset.from_dict(rows), eval_dataset=evaluated, rubric=rubric, max_turns=2)
