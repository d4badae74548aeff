"""The official `openai` client against `fox serve`: completes, streams, and is told what is wrong.

    python -m venv /tmp/openai && /tmp/openai/bin/pip install openai
    fox serve runs/tiny-fox-pro &
    /tmp/openai/bin/python bench/openai_client.py http://127.0.0.1:8080 --prompt 'Ann sings. Ben cooks. Ann'
"""

import argparse
import os
import time

import openai


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

    for wrong, kind in [({"suffix": "x"}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError)]:
        try:
            client.completions.create(**{**ask, **wrong})
            raise SystemExit(f"{wrong} was accepted")
        except kind as error:
            print(f"{wrong}: {error.status_code}, {error.body['message']}")
    print("ok")


if __name__ == "__main__":
    main()
