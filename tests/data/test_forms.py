"""The forms of data that people have: the table of docs/data_format.md, cell by cell, on a small row of each."""

import json
import re
from pathlib import Path

import pytest

from verl.config.schema.offline import EvalConfig, GenerationConfig
from verl.data.forms import as_messages, read_prompt_column
from verl.data.messages import with_system
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.evaluation.prompts import PromptSet
from verl.evaluation.score import read_responses
from verl.recipe.dpo.dataset import PreferenceDataset

PAGE = Path(__file__).parents[2] / "docs" / "data_format.md"
USER = {"role": "user", "content": "What is 2+3?"}
TURN = {"role": "assistant", "content": "It is 5."}
RULE = {"style": "rule", "ground_truth": "5"}
SHAREGPT = [{"from": "human", "value": "What is 2+3?"}, {"from": "gpt", "value": "It is 5."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is 2+3?"}]}, TURN]
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}

#: form -> a row, and the results of train, sft and eval: the text that is compared or trained, or a text of the error.
#: Generation reads the same prompts as training.
TOOLS_FIRST = "{{ tools | tojson if tools else '' }}"
NO_TRUTH, CHAT, NO_RESPONSE = "no truth", "!ends with an assistant message", "!data.response_key"
FORMS = {
    "GSM8K": ({"question": "What is 2+3?", "answer": "2+3=5\n#### 5"}, "2+3=5\n#### 5", "2+3=5\n#### 5"),
    "DAPO-Math-17k": (
        {"prompt": [USER], "data_source": "math_dapo", "ability": "MATH", "reward_model": RULE, "extra_info": {}},
        "5",
        NO_RESPONSE,
    ),
    "Eurus-2-RL": ({"prompt": [USER], "data_source": "taco", "reward_model": RULE, "extra_info": {}}, "5", NO_RESPONSE),
    "DeepScaleR": ({"problem": "What is 2+3?", "solution": "It is 5.", "answer": "5"}, "5", "It is 5."),
    "OpenR1-Math": ({"problem": "What is 2+3?", "solution": "It is 5.", "answer": "5", "messages": [USER, TURN]}, "5",
     "It is 5."),
    "AIME 2024": ({"ID": "2024-I-1", "Problem": "What is 2+3?", "Solution": "2+3=5", "Answer": 5}, "5", "2+3=5"),
    "Search-R1": ({ "question": "What is 2+3?", "golden_answers": ["5", "five"], "data_source": "nq", "prompt": [USER],
     "reward_model": {"style": "rule", "ground_truth": {"target": ["5", "five"]}}, }, {"target": ["5", "five"]},
     NO_RESPONSE),
    "KodCode": ({"question": "What is 2+3?", "solution": "def f(): return 5", "test": "def test_f(): assert f() == 5"},
     "def test_f(): assert f() == 5", "def f(): return 5"),
    "geo3k": ({"problem": "What is 2+3?", "answer": "5", "images": []}, "5", "5"),
    "MMLU": ({"question": "What is 2+3?", "subject": "math", "choices": ["4", "6", "5", "7"], "answer": 2}, "2",
     "!is not text: found 2"),
    "ARC": ({"question": "What is 2+3?", "choices": {"text": ["4", "5"], "label": ["A", "B"]}, "answerKey": "B"}, "B",
     NO_RESPONSE),
    "xLAM": ({"query": "What is 2+3?", "answers": '[{"name": "add", "arguments": {}}]', "tools": json.dumps([TOOL])},
     '[{"name": "add", "arguments": {}}]', None),
    "Hermes": ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, CHAT, "It is 5."),
    "BFCL": ({"id": "simple_0", "question": [[USER]], "function": [TOOL]}, NO_TRUTH, NO_RESPONSE),
    "ShareGPT": ({"conversations": SHAREGPT}, CHAT, "It is 5."),
    "Alpaca": ({"instruction": "What is", "input": "2+3?", "output": "It is 5."}, NO_TRUTH, "It is 5."),
    "OpenAI messages": ({"messages": PARTS}, CHAT, "It is 5."),
    "messages as JSON text": ({"messages": json.dumps([USER, TURN])}, CHAT, "It is 5."),
    "TRL prompt and completion": ({"prompt": "What is 2+3?", "completion": "It is 5."}, NO_TRUTH, "It is 5."),
    "TRL conversational": ({"prompt": [USER], "completion": [TURN]}, NO_TRUTH, "It is 5."),
    "UltraFeedback": (
        {"prompt": "What is 2+3?", "chosen": [USER, TURN], "rejected": [USER, {**TURN, "content": "It is 6."}]},
        NO_TRUTH,
        "It is 5.",
    ),
}  # fmt: skip


def outcome(read):
    """What a function returns, or "!" and its error."""
    try:
        return read()
    except ValueError as error:
        return f"!{error}"


def matches(found, expected):
    return expected[1:] in found if isinstance(expected, str) and expected.startswith("!") else found == expected


@pytest.fixture
def path(tmp_path):
    def write(row, **more):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row | more) + "\n")
        return str(file)

    return write


@pytest.mark.parametrize("form", FORMS)
def test_training_reads_it(form, path, chat_tokenizer):
    row, truth, _ = FORMS[form]
    chat_tokenizer.chat_template = TOOLS_FIRST + chat_tokenizer.chat_template.removeprefix(TOOLS_FIRST)
    found = outcome(lambda: RLHFDataset(path(row), chat_tokenizer)[0])
    if isinstance(truth, str) and truth.startswith("!"):
        assert matches(found, truth)
        return
    assert found["reward_model"]["ground_truth"] == (None if truth is NO_TRUTH else truth)
    prompt = "".join(message["content"] for message in found["raw_prompt"])
    assert "".join(prompt.split()).startswith("Whatis2+3?")
    assert ("C. 5" in prompt or "B. 5" in prompt) == ("choices" in row)
    missing = (
        row.keys() - found["extra_info"].keys() - {"prompt", "data_source", "reward_model", "extra_info", "images"}
    )
    assert len(missing) <= 1  # the column of the prompt


@pytest.mark.parametrize("form", FORMS)
def test_sft_reads_it(form, path, chat_tokenizer):
    row, _, response = FORMS[form]
    found = outcome(lambda: SFTDataset(path(row), chat_tokenizer)[0])
    if response is None:
        return  # tools are rendered, or refused, as docs/sft.md says
    if response.startswith("!"):
        assert matches(found, response)
        return
    assert chat_tokenizer.decode(found["response_ids"]).removesuffix("\n") == response + "<|im_end|>"
    assert "What is" in chat_tokenizer.decode(found["prompt_ids"])


@pytest.mark.parametrize("form", FORMS)
def test_generation_reads_it(form, path, chat_tokenizer):
    row, truth, _ = FORMS[form]
    chat_tokenizer.chat_template = TOOLS_FIRST + chat_tokenizer.chat_template.removeprefix(TOOLS_FIRST)
    config = GenerationConfig.model_validate({"data": {"path": [path(row)]}})
    found = outcome(lambda: chat_tokenizer.decode(PromptSet(config, chat_tokenizer).prompt_ids[0]))
    assert CHAT[1:] in found if truth is CHAT else "What is" in found and not found.startswith("!")


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_reads_it(form, path):
    row, truth, _ = FORMS[form]
    data = EvalConfig().data
    found = outcome(lambda: read_responses([path(row, responses=["5"])], data)[0].ground_truth)
    if truth in (NO_TRUTH, CHAT):
        assert "no ground truth" in found
    else:
        assert str(found) == str(truth)


def test_the_page_has_the_results_of_every_form():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    cells = {name: [train, sft, evaluate] for name, train, sft, evaluate in rows}
    for form, (_, truth, response) in FORMS.items():
        train, sft, evaluate = cells[form]
        assert train.startswith("no" if truth is CHAT else "prompts" if truth is NO_TRUTH else "yes"), form
        assert response is None or sft.startswith("no" if response.startswith("!") else "yes"), form
        assert evaluate.startswith("no" if truth in (NO_TRUTH, CHAT) else "yes"), form


def test_a_chat_as_text_of_python_is_a_chat(path, chat_tokenizer):
    """As pandas writes it to CSV. Without commas, as numpy writes it, it is an error."""
    found = RLHFDataset(path({"prompt": str([USER]), "answer": "5"}), chat_tokenizer)[0]
    assert found["raw_prompt"] == [USER]
    with pytest.raises(ValueError, match="line 1: expected a chat as a list of messages or its JSON text"):
        RLHFDataset(path({"prompt": f"[{USER} {TURN}]", "answer": "5"}), chat_tokenizer)


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        ("document", "what it needs of it belongs into the prompt"),
        ("Body", "what it needs of it belongs into the prompt"),
        ("reasoning", "what it needs of it belongs into the prompt"),
        ("function", "rename it to 'tools'"),
        ("image", "set data.image_key"),
        ("decoded_image", "set data.image_key"),
        ("image_1", "set data.image_key"),
        ("level", None),
        ("data_source", ""),
    ],
)
def test_columns_that_the_model_does_not_see_are_named(column, advice, path, chat_tokenizer, caplog):
    caplog.set_level("INFO", "verl.data")
    RLHFDataset(path({"question": "What is 2+3?", "answer": "5", column: "x"}), chat_tokenizer)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(repr(column) in text and advice in text for text in warnings) and len(warnings) == bool(advice)
    assert (f"not shown to the model: {column}" in caplog.text) == (advice != "")


def test_text_that_only_looks_like_a_chat_is_text():
    for text in ("[{", '[{"name": "f"}]', "[1, 2]", "plain"):
        assert as_messages(text) == text
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    assert as_messages(image) == image


LIST, LABELED = ["4", "5"], {"text": ["4", "5"], "label": ["A", "B"]}
BRIEF, CALL = {"role": "system", "content": "Be brief."}, {"name": "add", "arguments": {}}


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("MMLU-Pro", {"options": LIST}, "A. 4\nB. 5"),
        ("MedQA", {"options": {"A": "4", "B": "5", "C": None}}, "A. 4\nB. 5"),
        ("AQuA-RAT", {"options": ["A)4", "B)5"]}, "A. 4\nB. 5"),
        ("MathQA", {"options": "a ) 4 , b ) 5"}, "a. 4\nb. 5"),
        ("CommonsenseQA", {"choices": LABELED}, "A. 4\nB. 5"),
        ("JSON text", {"choices": json.dumps(LIST)}, "A. 4\nB. 5"),
        ("MMMU", {"options": str(LIST)}, "A. 4\nB. 5"),
        ("a chat", {"question": [USER], "choices": LIST}, "A. 4\nB. 5"),
        ("named in the chat", {"question": [{**USER, "content": "What is 2+3?\n4 or 5"}], "choices": LIST}, "4 or 5"),
        ("settings of a custom dataset", {"options": {"depth": 1}}, None),
        ("no list", {"options": {"text": 5}}, None),
        ("no labels", {"options": {"text": LIST, "label": 5}}, None),
        ("Dolly", {"instruction": "What is 2+3?", "question": None, "context": "By hand."}, "\nBy hand."),
    ],
)  # fmt: skip
def test_what_a_row_has_beside_its_prompt_is_read(form, row, expected):
    row = {"question": "What is 2+3?", **row}
    prompt = read_prompt_column(row, "question" if row["question"] else "instruction")
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    assert text == "\n".join(filter(None, ["What is 2+3?", expected]))


@pytest.mark.parametrize(
    ("column", "value", "system"),
    [
        ("system", "Be brief.", "Be brief."),  # OpenThoughts, orca_dpo_pairs, ToolACE
        ("system_prompt", "Be brief.", "Be brief."),  # OpenOrca
        ("system_prompt", None, None),  # OpenHermes
        ("system", "", None),
        ("system", {"os": "linux"}, None),
    ],
)
def test_the_system_prompt_of_a_column_is_read_by_training_sft_and_preferences(
    column, value, system, path, chat_tokenizer
):
    more, found = {column: value}, {}
    found["train"] = RLHFDataset(path({"question": "What is 2+3?", "answer": "5"}, **more), chat_tokenizer)[0]
    found["chat"] = SFTDataset(path({"conversations": SHAREGPT}, **more), chat_tokenizer)[0]
    found["sft"] = SFTDataset(path({"question": "What is 2+3?", "response": "5"}, **more), chat_tokenizer)[0]
    pair = {"question": "What is 2+3?", "chosen": "5", "rejected": "6"}
    found["preference"] = PreferenceDataset(path(pair, **more), chat_tokenizer)[0]["samples"][1]
    for use, item in found.items():
        text = chat_tokenizer.decode(item["prompt_ids"])
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>" if system else "<|im_start|>user"), use
    own = [{**BRIEF, "content": "Think."}, USER]
    assert with_system(own, more) == own
    assert with_system("2+3=", more) == ("Be brief.\n\n2+3=" if system else "2+3=")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "User", "content": "a"}, {"role": "user", "content": "a"}),
        ({"from": "GPT", "value": "a"}, {"role": "assistant", "content": "a"}),
        ({"role": "critic", "content": "a"}, {"role": "critic", "content": "a"}),
        ({"from": "function_call", "value": json.dumps(CALL)}, {**TURN, "content": None, "tool_calls": [CALL]}),
        ({"from": "function_call", "value": "f()"}, {"role": "assistant", "content": "f()"}),
    ],
)  # fmt: skip
def test_roles_and_calls_are_those_of_templates(message, expected):
    assert as_messages([message]) == [expected]


def test_choices_that_the_prompt_names_are_not_repeated():
    row = {"prompt": "Is it A. red or B. blue?", "choices": ["red", "blue"]}
    assert read_prompt_column(row, "prompt") == row["prompt"]
    assert read_prompt_column({**row, "prompt": "Which?"}, "prompt") == "Which?\nA. red\nB. blue"
