"""The official `openai` client against `fox serve`: completions, chat, streaming and error responses.

    python -m venv /tmp/openai && /tmp/openai/bin/pip install openai
    fox serve runs/tiny-fox-pro &
    /tmp/openai/bin/python bench/openai_client.py http://127.0.0.1:8080 --prompt 'Ann sings. Ben cooks. Ann'
"""

import argparse
import os
import time

import openai


def chat(client, model, args):
    """A conversation, whole and streamed."""
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": args.prompt}]
    ask = dict(model=model, messages=messages, max_tokens=args.max_tokens, temperature=0.8, seed=7)
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, user="me", store=False)
    choice = whole.choices[0]
    print(f"chat: {choice.message.content!r}")
    assert choice.message.role == "assistant" and len(choice.logprobs.content[0].top_logprobs) == 2
    text, reason = "", None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            assert chunk.usage == whole.usage
            continue
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert text == choice.message.content and reason == choice.finish_reason
    for call in [lambda: client.responses.create(model=model, input="x"),
                 lambda: client.embeddings.create(model=model, input="x")]:
        try:
            call()
            raise SystemExit("an endpoint that is not there was answered")
        except openai.APIStatusError as error:
            print(f"{error.status_code}, {error.body['message']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the server is, without /v1")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    key = os.environ.get("FOX_API_KEY", "none")
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=key)

    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    ask = dict(model=model, prompt=args.prompt, max_tokens=args.max_tokens, temperature=0.8, seed=7, logprobs=2)

    whole = client.completions.create(**ask)
    choice = whole.choices[0]
    print(f"{model}, whole: {choice.text!r}")
    print(f"end: {choice.finish_reason}; {whole.usage.prompt_tokens} + {whole.usage.completion_tokens} tokens")

    text, logprobs, reason, first, start = "", [], None, None, time.time()
    options = {"include_usage": True}
    for chunk in client.completions.create(**ask, stream=True, stream_options=options):
        if not chunk.choices:
            usage = chunk.usage
            continue
        first = first or time.time() - start
        part = chunk.choices[0]
        text += part.text
        logprobs += part.logprobs.token_logprobs if part.logprobs else []
        reason = part.finish_reason or reason
    print(f"streamed: {text!r}")
    print(f"first chunk after {1e3 * first:.0f} ms, all after {1e3 * (time.time() - start):.0f} ms")
    assert text == choice.text and reason == choice.finish_reason and usage == whole.usage
    assert logprobs == choice.logprobs.token_logprobs

    several = client.completions.create(**{**ask, "prompt": [args.prompt, args.prompt], "n": 2})
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[2].text == choice.text

    chat(client, model, args)

    for wrong, kind in [({"suffix": "x"}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError)]:
        try:
            client.completions.create(**{**ask, **wrong})
            raise SystemExit(f"{wrong} was accepted")
        except kind as error:
            print(f"{wrong}: {error.status_code}, {error.body['message']}")
    print("ok")


if __name__ == "__main__":
    main()
