"""The environment of `tiny-agent`: what is wanted is known to a tool alone, which the policy has to ask.

It is an agent as OpenRLHF takes it: `reset` and `step` see and return text.
"""

import string
from typing import Any

ASK = "?"
KINDS = {"digits": string.digits, "capitals": string.ascii_uppercase}


class Oracle:
    """Half a point for asking, the other half for an answer of the kind of characters that is told then."""

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        self.kind = states["label"]
        self.asked = False
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        said = states["action_text"]
        if not self.asked and ASK in said:
            self.asked = True
            feedback = f"\n<|im_start|>tool\n{self.kind}<|im_end|>\n<|im_start|>assistant\n"
            return {"rewards": 0.5, "environment_feedback": feedback, "done": False}
        share = sum(character in KINDS[self.kind] for character in said) / max(1, len(said))
        return {"rewards": 0.5 * share if self.asked else 0.0, "environment_feedback": "", "done": True}
