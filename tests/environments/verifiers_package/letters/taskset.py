"""The tasks, and what they are worth."""

import verifiers.v1 as vf

KINDS = {"digits": "0123456789", "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


class LettersData(vf.TaskData):
    answer: str
    """A name in `KINDS`."""


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=2.0)
    async def of_the_kind(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return sum(letter in KINDS[self.data.answer] for letter in said) / max(1, len(said))

    @vf.reward(weight=0.5)
    async def said_twice(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages) == 2)


class LettersConfig(vf.TasksetConfig):
    tasks: int = 4


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        for number in range(self.config.tasks):
            kind = list(KINDS)[number % len(KINDS)]
            data = LettersData(name=f"{kind}-{number}", prompt=f"Say {kind}", answer=kind)
            yield LettersTask(data, self.config.task)
