"""An OpenAI-compatible server on loopback that serves the packaged model, and misbehaves on request.

    python tests/llm_server.py --port 8177 --faults "429,500,malformed" --log calls.jsonl

`--faults` lists what the first requests meet, one fault a request; after that it behaves. `--every N` starts the list anew every N
requests. Faults: 429 (with Retry-After), 500, malformed (half a JSON body), empty, think, nostop, content, null, nochoices, hang, die
(the process exits without an answer), ok. A prompt that holds `[[fault]]` meets that fault each time. `--echo` answers without the model:
the last line of the prompt in reverse order of words. Each answered request is one line of `--log`.
"""

import argparse
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from memloc.llm import LLMError, LocalModel, Sampling

FAULTS = ("ok", "429", "500", "malformed", "empty", "think", "nostop", "content", "null", "nochoices", "hang", "die")


def echo(messages: list[dict[str, str]]) -> str:
    return " ".join(reversed(messages[-1]["content"].strip().splitlines()[-1].split())) or "nothing"


def build_app(faults: list[str], every: int, log: Path | None, use_model: bool, die_after: int) -> FastAPI:
    app, lock, seen, sent = FastAPI(), threading.Lock(), [], []
    model = LocalModel("smollm2", device="cpu") if use_model else None

    def answer(body: dict) -> tuple[str, int, int]:
        if model is None:
            text = echo(body["messages"])
            return text, sum(len(m["content"].split()) for m in body["messages"]), len(text.split())
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        sampling = Sampling(limit, body.get("temperature") or 0.0, body.get("seed") or 0, tuple(body.get("stop") or ()))
        with lock:
            outcome = model.chat([body["messages"]], sampling)[0]
        if isinstance(outcome, LLMError):
            raise outcome
        return outcome.text, outcome.n_prompt_tokens, outcome.n_completion_tokens

    def fault_of(body: dict) -> str:
        named = re.search(r"\[\[(\w+)\]\]", body["messages"][-1]["content"])
        with lock:
            seen.append(named[1] if named else None)
            place = len(seen) - 1
        if named:
            return named[1]
        if every:
            place %= every
        return faults[place] if place < len(faults) else "ok"

    @app.get("/health")
    def health():
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def completions(request: Request):
        from starlette.background import BackgroundTask
        from starlette.concurrency import run_in_threadpool

        response = await run_in_threadpool(respond, await request.json())
        response.background = BackgroundTask(sent.append, True)  # runs once the reply is on its way
        return response

    def respond(body: dict) -> Response:
        fault = fault_of(body)
        if die_after and len(seen) > die_after:
            while len(sent) < die_after:  # a reply that was logged and never left would count as answered here and as lost there
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "429":
            return JSONResponse({"error": {"message": "slow down"}}, 429, headers={"Retry-After": "0.2"})
        if fault == "500":
            return JSONResponse({"error": {"message": "internal"}}, 500)
        if fault == "hang":
            time.sleep(30)
        try:
            text, n_prompt, n_completion = answer(body)
        except LLMError as error:
            return JSONResponse({"error": {"message": f"maximum context length exceeded: {error}"}}, 400)
        text = {"empty": "", "null": None, "think": f"<think>[9] or [1]?</think>\n{text}",
                "nostop": f"{text}{(body.get('stop') or [''])[0]} and further [9]"}.get(fault, text)
        choice = {"index": 0, "finish_reason": "content_filter" if fault == "content" else "stop",
                  "message": {"role": "assistant", "content": text}}
        made = {"id": f"c{len(seen)}", "object": "chat.completion", "created": 0, "model": body["model"],
                "choices": [] if fault == "nochoices" else [choice],
                "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}}
        raw = json.dumps(made)
        if log:
            with lock, log.open("a") as file:
                file.write(json.dumps({"fault": fault, "messages": body["messages"], "parameters": sorted(set(body) - {"messages"})}) + "\n")
        return Response(raw[:60] if fault == "malformed" else raw, media_type="application/json")

    return app


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--faults", default="", help=f"comma-separated, of {', '.join(FAULTS)}")
    parser.add_argument("--every", type=int, default=0, help="start the list of faults anew every N requests")
    parser.add_argument("--die-after", type=int, default=0, help="kill the process at request N + 1")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--echo", action="store_true", help="answer without the model")
    given = parser.parse_args()
    faults = [fault for fault in given.faults.split(",") if fault]
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"unknown faults {sorted(unknown)}; known: {', '.join(FAULTS)}")
    app = build_app(faults, given.every, given.log, not given.echo, given.die_after)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
