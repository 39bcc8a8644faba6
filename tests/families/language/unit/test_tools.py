"""Conversations with tools, reasoning, documents and content in parts, against Transformers' own rendering.

The templates are those of real models, in short; what is learned is compared with `apply_chat_template` token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.contracts.data import IGNORE, Features
from fullshard.data.formats import open_file
from fullshard.data.prepare import prepare, remarks
from fullshard.data.records import ArrowRecords
from fullshard.data.sources.files import Files
from fullshard.errors import DataError
from fullshard.families.language.encoders.chat import Chat
from fullshard.text.chat import PLAIN

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
    {{- '\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}{%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA31 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start|>system<|end|>' + system }}
{%- if tools is not none %}{%- for t in tools %}{{- '\\n' }}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>ipython<|end|>' }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message['tool_calls'] is defined and message['tool_calls'] is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}{{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + '}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles are supported') }}{%- endif %}
{%- endfor %}"""

DEEPSEEK = """{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}{{ '<call>' + call['function']['name'] + '\\n```json\\n'
+ call['function']['arguments'] + '\\n```' }}{% endfor %}{{ eos_token }}
{%- else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].strip() + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Asks for null where a message has no text, and for arguments as a string."""

MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}
{{- m.content or '' }}{% for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "who is the fox"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"degrees": 12}', "tool_call_id": "call_1", "name": "weather"},
    {"role": "assistant", "content": "the lazy dog"},
    {"role": "user", "content": "and you?"},
    {"role": "assistant", "content": "fine, thanks"},
]
ANSWERS = (1, 3, 5)


@pytest.fixture(scope="module")
def with_template(tokenizer_with: Callable[..., Any]) -> Callable[[str], Any]:
    def make(template: str) -> Any:
        tokenizer = tokenizer_with(bos="<bos>", chat_template=template)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>", "<|eot|>"]})
        return tokenizer

    return make


def encode(record: dict[str, Any], tokenizer: Any, **settings: Any) -> list[Features]:
    """The samples of a record; the first also holds the encoder's remarks about it."""
    found = Chat(**settings).open(tokenizer, length=100_000).encode(record)
    remarks = {name: np.array(lines) for name, lines in (("lost", found.lost), ("noted", found.noted)) if lines}
    return [{**sample, **(remarks if at == 0 else {})} for at, sample in enumerate(found.samples)]


def learned(sample: Features, tokenizer: Any) -> str:
    ids, labels = sample["input_ids"], sample["labels"]
    targets = np.flatnonzero(labels != IGNORE)
    assert (labels[targets] == ids[targets + 1]).all()
    return str(tokenizer.decode(labels[targets]))


def lost(samples: list[Features]) -> list[str]:
    assert not any("lost" in sample or "noted" in sample for sample in samples[1:])
    return [str(line).removesuffix(" that the chat template does not render") for line in samples[0].get("lost", ())]


def reference(messages: list[dict[str, Any]], tokenizer: Any, **more: Any) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(messages, **more)["input_ids"]
    return found


@pytest.mark.parametrize("template", [QWEN25, LLAMA31], ids=["qwen2.5", "llama3.1"])
def test_tool_calls_are_rendered_and_learned(with_template: Callable[[str], Any], template: str) -> None:
    tokenizer = with_template(template)
    (sample,) = encode({"messages": CHAT, "tools": TOOLS}, tokenizer)
    assert sample["input_ids"].tolist() == reference(CHAT, tokenizer, tools=TOOLS)
    said = learned(sample, tokenizer)
    end = "<|im_end|>" if template is QWEN25 else "<|eot|>"
    assert [part.strip() for part in said.split(end)][1:] == ["the lazy dog", "fine, thanks", ""]
    assert '"name": "weather"' in said
    assert "Köln" in said
    assert "degrees" not in said
    assert lost([sample]) == []


def test_a_template_that_moves_the_tools_gives_each_answer_as_it_was_given(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(MISTRAL)
    samples = encode({"messages": CHAT, "tools": TOOLS}, tokenizer)
    # The tools come before the last user message: the first two answers share a text, the third has its own.
    assert [s["input_ids"].tolist() for s in samples] == [
        reference(CHAT[:4], tokenizer, tools=TOOLS),
        reference(CHAT, tokenizer, tools=TOOLS),
    ]
    assert learned(samples[0], tokenizer).endswith('"arguments": {"city": "Köln"}}]<eos> the lazy dog<eos>')
    assert learned(samples[1], tokenizer) == " fine, thanks<eos>"
    assert "a separate sample" in str(samples[0]["noted"][0])


def test_reasoning_that_a_template_drops_later_is_learned_where_it_was_given(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template(QWEN3)
    messages = [dict(message) for message in CHAT]
    for turn in ANSWERS:
        messages[turn]["reasoning_content"] = f"thought {turn}"
    samples = encode({"messages": messages, "tools": TOOLS}, tokenizer)
    assert [s["input_ids"].tolist() for s in samples] == [
        reference(messages[:4], tokenizer, tools=TOOLS),
        reference(messages, tokenizer, tools=TOOLS),
    ]
    first, last = (learned(sample, tokenizer) for sample in samples)
    assert first.count("<think>") == 2
    assert "thought 1" in first
    assert last == "<think>\nthought 5\n</think>\n\nfine, thanks<|im_end|>"
    assert lost(samples) == []
    # Transformers takes the other names of the same thing for it, or not; so do we.
    for name in ("thinking", "reasoning"):
        other = [{(name if k == "reasoning_content" else k): v for k, v in m.items()} for m in messages[:2]]
        (sample,) = encode({"messages": other}, tokenizer)
        assert sample["input_ids"].tolist() == reference(other, tokenizer)


def test_masks_equal_those_that_the_template_marks(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(MARKED)
    truth = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    (sample,) = encode({"messages": CHAT, "tools": TOOLS}, tokenizer)
    assert sample["input_ids"].tolist() == truth["input_ids"]
    assert (sample["labels"] != IGNORE).tolist() == [bool(m) for m in [*truth["assistant_masks"][1:], 0]]
    assert lost([sample]) == ["tools"]
    # Found by rendering prefixes, the same tokens are learned.
    plain = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "").replace("\n{{-", "{{-")
    prompted = with_template(plain + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    (unmarked,) = encode({"messages": CHAT}, prompted)
    assert unmarked["labels"].tolist() == sample["labels"].tolist()


def test_what_a_template_does_not_render_is_named(with_template: Callable[[str], Any], chatml: Any) -> None:
    (sample,) = encode({"messages": CHAT, "tools": TOOLS, "documents": [{"title": "a", "text": "b"}]}, chatml)
    assert lost([sample]) == ["tools", "documents", "tool_calls"]
    # The call itself is an empty turn in this template, and is not learned as an answer.
    assert learned(sample, chatml) == "the lazy dog<|im_end|>fine, thanks<|im_end|>"
    thinking = [CHAT[0], {"role": "assistant", "content": "x", "reasoning_content": "hm", "weight": 1}]
    assert lost(encode({"messages": thinking}, chatml)) == ["reasoning_content", "weight"]
    silent = with_template("{% for m in messages if m.role == 'assistant' %}{{ m.content + eos_token }}{% endfor %}")
    assert lost(encode({"messages": CHAT[-2:]}, silent)) == ["a user message"]
    assert lost(encode({"messages": CHAT[-2:], "id": 3, "source": "web"}, chatml)) == []


def test_other_columns_reach_the_template(with_template: Callable[[str], Any]) -> None:
    template = (
        "{{ mood }}|{% for d in documents or [] %}{{ d.text }}{% endfor %}|"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = with_template(template)
    for documents in ([{"text": "one"}], json.dumps([{"text": "one"}]), ["one"], "one"):
        record = {"question": "q", "answer": "a", "documents": documents, "mood": "glad", "add_generation_prompt": True}
        assert tokenizer.decode(encode(record, tokenizer)[0]["input_ids"]) == "glad|one|qa<eos>"
    asked = {"question": "q", "answer": "a", "chat_template_kwargs": {"mood": "sad"}}
    assert tokenizer.decode(encode(asked, tokenizer)[0]["input_ids"]) == "sad||qa<eos>"
    # A column is never taken for a function that a template calls.
    calls = {"namespace": "x", "raise_exception": "y", "range": 3}
    tokenizer = with_template(QWEN3)
    assert encode({"messages": CHAT[4:], **calls}, tokenizer)[0]["input_ids"].tolist() == reference(CHAT[4:], tokenizer)
    several = with_template("{{ 'none' }}")
    several.chat_template = {"default": "{{ 'no tools' }}", "tool_use": "{{ 'with ' + tools[0].function.name }}"}
    assert several.decode(
        encode({"messages": CHAT, "tools": TOOLS}, several, train_on="all")[0]["input_ids"]
    ).startswith("with weather")
    assert several.decode(encode({"messages": CHAT}, several, train_on="all")[0]["input_ids"]).startswith("no tools")


def openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As OpenAI's API writes it: null for no text, arguments as a string."""
    calls = [{**CALL, "function": {"name": "weather", "arguments": json.dumps({"city": "Köln"})}}]
    return [
        m if "tool_calls" not in m else {"role": "assistant", "content": None, "tool_calls": calls} for m in messages
    ]


def shared(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """As ShareGPT-like data sets write it."""
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    call = {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Köln"}})}
    return [call if "tool_calls" in m else {"from": names[m["role"]], "value": m["content"]} for m in messages]


@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA31, MARKED], ids=["qwen2.5", "qwen3", "llama3.1", "marked"])
def test_every_way_to_write_a_call_gives_the_same_tokens(with_template: Callable[[str], Any], template: str) -> None:
    tokenizer = with_template(template)
    truth = encode({"messages": CHAT, "tools": TOOLS}, tokenizer)
    filled = [{"name": None, "tool_calls": None, "reasoning_content": None, **message} for message in CHAT]
    bare = [m if "tool_calls" not in m else {**m, "tool_calls": json.dumps([CALL["function"]])} for m in CHAT]
    for record in (
        {"messages": openai(CHAT), "tools": json.dumps(TOOLS)},
        {"conversations": shared(CHAT), "tools": json.dumps(TOOLS)},
        {"messages": filled, "tools": [json.dumps(TOOLS[0])], "documents": None},
        {"messages": bare, "tools": TOOLS},
        {"messages": [{**m, "tool_calls": m.get("tool_calls", [])} for m in CHAT], "tools": TOOLS, "documents": []},
    ):
        found = encode(record, tokenizer)
        assert [s["input_ids"].tolist() for s in found] == [s["input_ids"].tolist() for s in truth]
        assert [s["labels"].tolist() for s in found] == [s["labels"].tolist() for s in truth]


def test_columns_of_a_table_give_the_same_tokens_as_json(with_template: Callable[[str], Any], tmp_path: Path) -> None:
    """Arrow gives every object the keys of all of them; a template must not see the nulls that fill them."""
    import datasets

    other = {**CALL, "function": {"name": "time", "arguments": {"zone": "CET"}}}
    records: list[dict[str, Any]] = [
        {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [call]}, *CHAT[2:]], "tools": TOOLS} for call in (CALL, other)
    ]
    records.append({"messages": CHAT[4:], "tools": None})
    table = datasets.Dataset.from_list(records)
    assert table[0]["messages"][0]["tool_calls"] is None
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Köln", "zone": None}
    table.to_parquet(str(tmp_path / "table.parquet"))
    tokenizer = with_template(LLAMA31)
    for stored in (ArrowRecords(table, name="table"), open_file(tmp_path / "table.parquet")):
        for index, record in enumerate(records):
            (truth,), (found,) = encode(record, tokenizer), encode(dict(stored[index]), tokenizer)
            assert found["input_ids"].tolist() == truth["input_ids"].tolist()


def test_a_template_sees_no_key_that_is_null(with_template: Callable[[str], Any]) -> None:
    keys = with_template("{{ mood is defined }}{% for m in messages %};{{ m.keys() | join(',') }}{% endfor %}")
    messages = [{"role": "user", "content": "q", "name": None}, {"name": None, "tool_calls": None, **CHAT[3]}]
    (sample,) = encode({"messages": messages, "mood": None}, keys)
    assert keys.decode(sample["input_ids"]) == "False;role,content;role,content<eos>"


def test_a_null_argument_in_json_is_kept(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(QWEN25)
    call = {**CALL, "function": {"name": "weather", "arguments": {"city": None}}}
    messages = [CHAT[0], {**CHAT[1], "tool_calls": [call]}]
    (sample,) = encode({"messages": messages}, tokenizer)
    assert sample["input_ids"].tolist() == reference(messages, tokenizer)
    assert '{"city": null}' in learned(sample, tokenizer)


def test_a_template_gets_calls_and_parts_in_the_form_that_it_can_write(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(DEEPSEEK)
    (sample,) = encode({"messages": openai(CHAT[:2])}, tokenizer)
    assert '\n{"city": "Köln"}\n' in learned(sample, tokenizer)
    # Templates that print instead of writing JSON would show Python's notation.
    printing = with_template(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
        "{% endfor %}"
    )
    parts = [{"type": "text", "text": "who "}, {"type": "text", "text": "are you"}]
    (sample,) = encode({"messages": [{"role": "user", "content": parts}, CHAT[1]]}, printing)
    assert printing.decode(sample["input_ids"]) == 'who are you{"city": "Köln"}<eos>'
    apart = with_template(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ '[' + p.text + ']' }}{% endfor %}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": parts}, CHAT[3]]
    (sample,) = encode({"messages": messages}, apart)
    assert apart.decode(sample["input_ids"]) == "[who ][are you]the lazy dog<eos>"
    assert sample["input_ids"].tolist()[:-1] == reference(messages, apart)
    result = [*CHAT[:2], {"role": "tool", "content": {"degrees": 12}}, CHAT[3]]
    llama = with_template(LLAMA31)
    assert encode({"messages": result}, llama)[0]["input_ids"].tolist() == reference(result, llama)


def test_plain_has_tools_too(tokenizer: Any, tokenizer_with: Callable[..., Any]) -> None:
    (sample,) = encode({"messages": openai(CHAT[:4]), "tools": TOOLS}, tokenizer)
    call = '{"name": "weather", "arguments": {"city": "Köln"}}'
    assert tokenizer.decode(sample["input_ids"]) == (
        f"Tools: {json.dumps(TOOLS)}\n\nUser: who is the fox\nAssistant: \nCall: {call}<eos>\n"
        'Tool: {"degrees": 12}\nAssistant: the lazy dog<eos>\n'
    )
    assert learned(sample, tokenizer) == f" \nCall: {call}<eos> the lazy dog<eos>"
    assert lost([sample]) == []
    carrier = tokenizer_with(chat_template=PLAIN)
    assert reference(CHAT[:4], carrier, tools=TOOLS) == sample["input_ids"].tolist()
    assert json.dumps(CALL["function"], ensure_ascii=False) in "".join(Chat().texts({"messages": CHAT, "tools": TOOLS}))


def test_faults_of_tools(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(QWEN25)

    def message(record: dict[str, Any]) -> str:
        with pytest.raises(DataError) as caught:
            encode(record, tokenizer)
        return str(caught.value)

    def called(call: Any) -> dict[str, Any]:
        return {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": call}]}

    assert "message 2, tool call 1: 'arguments' must be JSON, found '{city'" in message(
        called([{"function": {"name": "f", "arguments": "{city"}}])
    )
    assert "'arguments' must be an object, found a list" in message(called([{"name": "f", "arguments": "[1]"}]))
    assert "message 2, tool call 1 must have a function like" in message(called([{"arguments": {}}]))
    assert "message 2: 'tool_calls' must be a list of objects, found a number in it" in message(called([3]))
    assert "'tools' must be JSON, found 'calculator'" in message({"messages": CHAT, "tools": "calculator"})
    assert "message 2: 'value' must be JSON like" in message(
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "f(x)"}]}
    )
    assert "message 1: 'content' is null, and the message has no other content" in message(
        {"messages": [{"role": "user", "content": None}]}
    )
    picture = [{"type": "image", "image": "a.png"}]
    assert "message 1 has a part of type 'image', and a language model reads only text parts" in message(
        {"messages": [{"role": "user", "content": picture}]}
    )
    llama = with_template(LLAMA31)
    two = [CHAT[0], {**CHAT[1], "tool_calls": [CALL, CALL]}]
    with pytest.raises(DataError, match="refuses this conversation: only single tool-calls at once!"):
        encode({"messages": two}, llama)


def test_records_of_which_something_is_lost_are_counted(chatml: Any, tmp_path: Path) -> None:
    records = [{"messages": CHAT, "tools": TOOLS}] * 3 + [{"messages": CHAT[4:]}] * 2
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    made = prepare(
        train=Files(path=str(tmp_path / "chat.jsonl")).open(),
        validation=None,
        encode=None,
        processor=chatml,
        length=512,
        pack=False,
        holdout=0.0,
        seed=0,
        cache=tmp_path / "cache",
        say=lambda line: None,
    )
    assert remarks(made.train_from.store.counts.lost) == [
        "3 records have tools that the chat template does not render",
        "3 records have tool_calls that the chat template does not render",
    ]
    assert set(made.train_from.store.names) == {"input_ids", "labels"}
