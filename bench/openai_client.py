"""The official clients against `fox serve`: completions, chat, structured output, tools, responses, streaming, errors.

    python -m venv /tmp/openai && /tmp/openai/bin/pip install openai anthropic jsonschema
    fox serve runs/tiny-fox-pro &
    /tmp/openai/bin/python bench/openai_client.py http://127.0.0.1:8080 --prompt 'Ann sings. Ben cooks. Ann'
"""

import argparse
import json
import os
import time
import urllib.request

import anthropic
import jsonschema
import openai

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mood": {"enum": ["glad", "sad"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
    request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
    time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket""".split()


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
    try:
        client.embeddings.create(model=model, input="x")
        raise SystemExit("an endpoint that is not there was answered")
    except openai.APIStatusError as error:
        print(f"{error.status_code}, {error.body['message']}")


def structured(client, model, args):
    """Every sample is valid against its schema."""
    schema = {"name": "person", "strict": True, "schema": SCHEMA}
    ask = dict(model=model, messages=[{"role": "user", "content": args.prompt}], max_tokens=1000)
    valid, texts = 0, set()
    for _ in range(args.samples // 10):
        answer = client.chat.completions.create(
            **ask, n=10, response_format={"type": "json_schema", "json_schema": schema})
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            assert choice.finish_reason == "stop"
            valid += 1
            texts.add(choice.message.content)
    print(f"structured output: {valid} of {args.samples} samples valid, {len(texts)} different")
    word = client.completions.create(
        model=model, prompt=args.prompt, max_tokens=9, extra_body={"guided_choice": ["left", "right"]})
    assert word.choices[0].text in ("left", "right")


def tools(client, model, args):
    """Tool calls that are asked for, through three APIs."""
    function = {"name": "note", "description": "Takes a note.", "parameters": SCHEMA}
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": args.prompt}], max_tokens=1000,
        tools=[{"type": "function", "function": function}], tool_choice="required", parallel_tool_calls=False)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "note" and answer.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    text, final = "", None
    for event in client.responses.create(model=model, input=args.prompt, max_output_tokens=20, stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
        final = event.response if event.type in ("response.completed", "response.incomplete") else None
    assert final.output_text == text and final.usage.output_tokens <= 20
    other = anthropic.Anthropic(base_url=args.url, api_key=os.environ.get("FOX_API_KEY", "none"))
    message = other.messages.create(
        model=model, max_tokens=1000, messages=[{"role": "user", "content": args.prompt}],
        tools=[{"name": "note", "input_schema": SCHEMA}], tool_choice={"type": "tool", "name": "note"})
    jsonschema.validate(message.content[0].input, SCHEMA)
    ask = dict(model=model, max_tokens=20, messages=[{"role": "user", "content": args.prompt}])
    with other.messages.stream(**ask) as events:
        streamed = "".join(events.text_stream)
        assert "".join(block.text for block in events.get_final_message().content) == streamed
    print(f"tools, responses ({text!r}) and messages ({streamed!r}) answer")


def ends(client, model, args):
    """A chat stops at every id that ends an answer: the bias makes the model choose it."""
    with urllib.request.urlopen(f"{args.url}/tokenizer_info") as reply:
        ids = json.load(reply)["end_token_ids"]
    for end in ids:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": args.prompt}], max_tokens=50,
            logit_bias={str(end): 100}, temperature=0)
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == "", end
    print(f"a chat stops at each of the end ids {ids}")
    with urllib.request.urlopen(f"{args.url}/metrics") as reply:
        text = reply.read().decode()
    missing = [name for name in NAMES if f"\nvllm:{name}{{" not in text]
    assert not missing, missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the server is, without /v1")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--samples", type=int, default=100, help="samples of structured output")
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
    assert several.choices[0].text == choice.text
    five = client.completions.create(model=model, prompt=[args.prompt] * 5, max_tokens=args.max_tokens)
    assert len({choice.text for choice in five.choices}) == 5
    print("five samples of one prompt differ")

    chat(client, model, args)
    structured(client, model, args)
    tools(client, model, args)
    ends(client, model, args)

    for wrong, kind in [({"suffix": "x"}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError)]:
        try:
            client.completions.create(**{**ask, **wrong})
            raise SystemExit(f"{wrong} was accepted")
        except kind as error:
            print(f"{wrong}: {error.status_code}, {error.body['message']}")
    print("ok")


if __name__ == "__main__":
    main()
