"""A harness without a program of its own, and so without anything to install."""

import httpx
import verifiers.v1 as vf


class LettersHarnessConfig(vf.HarnessConfig):
    broken: bool = False


class LettersHarness(vf.Harness[LettersHarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **others):
        if self.config.broken:
            return vf.ProgramResult(exit_code=3, stdout="", stderr="out of letters")
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=300) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "Again"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
