"""Ask a language model for JSON of a schema, and for calls of a function, with OpenAI's client.

    penstock serve FOLDER
    python examples/structured_output.py NAME --url http://127.0.0.1:8000

It works with any language model; how good the answers are depends on the model. Calls need a chat
template that shows tools.
"""

from __future__ import annotations

import argparse
import json

from openai import BadRequestError, OpenAI

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def person(client: OpenAI, model: str) -> dict[str, object]:
    """Return a person that the model invents."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Invent a person, as JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON},
        },
        max_tokens=150,
    )
    found: dict[str, object] = json.loads(answer.choices[0].message.content)
    return found


def city(client: OpenAI, model: str) -> str:
    """Return the city whose weather the model asks for."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Lyon?"}],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=150,
    )
    (call,) = answer.choices[0].message.tool_calls
    return str(json.loads(call.function.arguments)["city"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="name of the served model")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    print("a person:", json.dumps(person(client, args.model)))
    try:
        print("the weather is asked for in:", json.dumps(city(client, args.model)))
    except BadRequestError as error:
        print("no tools:", error)


if __name__ == "__main__":
    main()
