"""A tokenizer that loses text is refused; one that only has another way with spaces is not."""

import logging

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from verl.config.schema import ModelConfig
from verl.data import tokenization
from verl.data.tokenization import (
    TokenTable,
    check_messages,
    check_tokenizer,
    encode_prompts,
    load_tokenizer,
    prepare_tokenizer,
    render_chats,
    truncate,
)

TEXTS = ["Tom has 3 apples.\n\nHow many?", "  two  spaces ", "x=3, y = 4"]


def word_tokenizer(pre_tokenizer, decoder, normalizer=None):
    """A small word-level or sentencepiece-like tokenizer, trained on TEXTS."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_byte_level_bpe_gives_every_text_back(chat_tokenizer):
    check_tokenizer(chat_tokenizer, [*TEXTS, "naïve café €5 😀 \t\r\n end "])


def test_sentencepiece_spaces_pass():
    check_tokenizer(word_tokenizer(pre_tokenizers.Metaspace(), decoders.Metaspace()), TEXTS)


def test_changes_of_the_normalizer_are_a_warning(caplog):
    tokenizer = word_tokenizer(pre_tokenizers.Metaspace(), decoders.Metaspace(), normalizers.Lowercase())
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        check_tokenizer(tokenizer, TEXTS)
    assert "normalizer changes 2 of 3 texts" in caplog.text  # "Tom" in the first; the spaces at the ends of the second


def test_lost_spaces_are_refused_with_place_and_difference():
    tokenizer = word_tokenizer(pre_tokenizers.WhitespaceSplit(), decoders.Fuse())
    with pytest.raises(ValueError, match=r"row 0: the tokenizer loses text: 'Tom has.*decodes to 'Tomhas"):
        check_tokenizer(tokenizer, TEXTS, lambda i: f"row {i}")


def test_unknown_and_vanished_texts_are_refused(char_tokenizer):
    check_tokenizer(char_tokenizer, ["abc=", "1,2:3="])
    with pytest.raises(ValueError, match="text 1: every token of 'XYZ' is unknown"):
        check_tokenizer(char_tokenizer, ["abc=", "XYZ"])
    with pytest.raises(ValueError, match=r"loses text: 'abz=' decodes to 'ab<unk>=' \(first difference at char.* 2\)"):
        check_tokenizer(char_tokenizer, ["abz="])
    char_tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[A-Z]"), "")
    with pytest.raises(ValueError, match="returns no tokens for 'XYZ'"):
        check_tokenizer(char_tokenizer, ["XYZ"])


def test_a_tokenizer_that_autotokenizer_replaces_is_caught(tmp_path):
    """Beside a Qwen2 config, AutoTokenizer builds Qwen2's class from the vocabulary: spaces vanish without a word."""
    symbols = ["<pad>", "<eos>", "<unk>", *"abc= \n"]
    backend = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    check_tokenizer(made, ["a b\nc="])
    made.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"loses text: 'a b.*AutoTokenizer selects a class by the model type"):
        check_tokenizer(AutoTokenizer.from_pretrained(tmp_path), ["a b\nc="])


def test_a_missing_pad_token_becomes_eos_with_a_note(chat_tokenizer, caplog):
    chat_tokenizer.pad_token = None
    with caplog.at_level(logging.INFO, logger="verl.data"):
        prepare_tokenizer(chat_tokenizer)
    assert chat_tokenizer.pad_token_id == chat_tokenizer.eos_token_id
    assert "no pad token: using its eos token '<|im_end|>'" in caplog.text


def test_a_missing_eos_token_is_refused(chat_tokenizer):
    chat_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        prepare_tokenizer(chat_tokenizer)


def test_a_name_that_is_neither_cached_nor_on_the_hub_is_an_error_at_once(tmp_path, monkeypatch):
    def unreachable(self, name, repo_type, timeout):
        raise ConnectionError(f"no route to the {repo_type} {name} within {timeout} s")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", unreachable)
    with pytest.raises(ValueError, match=r"me/tiny: no file or folder .*no route to the model me/tiny within 10"):
        load_tokenizer(ModelConfig(path="me/tiny"))


def test_render_chats_by_hand(chat_tokenizer):
    chats = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]]
    assert render_chats(chat_tokenizer, chats, add_generation_prompt=True) == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
    ]
    other = "{% for m in messages %}{{ m['content'] }}|{{ extra }}{% endfor %}"
    rendered = render_chats(
        chat_tokenizer, chats[:1], add_generation_prompt=True, chat_template=other, template_kwargs={"extra": "!"}
    )
    assert rendered == ["a|!"]


def test_the_bos_token_of_a_chat_is_that_of_its_template(chat_tokenizer):
    bos = chat_tokenizer.pad_token, chat_tokenizer.pad_token_id
    post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    chat_tokenizer.backend_tokenizer.post_processor = post_processor
    prompts = ["a", [{"role": "user", "content": "a"}]]
    text, chat = encode_prompts(chat_tokenizer, prompts, str, chat_template="{{ messages[0].content }}")
    assert text == [bos[1], *chat] and chat_tokenizer.decode(chat) == "a"


def test_a_template_that_refuses_names_the_chat(chat_tokenizer):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}ok"
    chats = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}]]
    with pytest.raises(
        ValueError, match=r"chat 1: the chat template raises an error for the turns \['system'\]: no system"
    ):
        render_chats(chat_tokenizer, chats, add_generation_prompt=True, chat_template=template)


def test_messages_are_checked_and_empty_keys_dropped():
    assert check_messages([{"role": "user", "content": "a", "name": None}], "x") == [{"role": "user", "content": "a"}]
    for wrong, message in [
        ([], "expected a list of chat messages"),
        (["a"], "expected messages like"),
        ([{"role": "user"}], "expected messages like"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0: expected role and content to be text.*list"),
    ]:
        with pytest.raises(ValueError, match=f"row 3: {message}"):
            check_messages(wrong, "row 3")


def test_truncate_by_hand():
    ids = [1, 2, 3, 4, 5]
    assert truncate(ids, 3, "left") == [3, 4, 5]
    assert truncate(ids, 3, "right") == [1, 2, 3]
    assert truncate(ids, 3, "middle") == [1, 4, 5]
    assert truncate(ids, 4, "middle") == [1, 2, 4, 5]
    assert truncate(ids, 1, "middle") == [5]
    assert truncate(ids, 5, "middle") == ids
    with pytest.raises(ValueError, match="expected left, right or middle"):
        truncate(ids, 2, "up")


def test_token_table():
    table = TokenTable()
    rows = [[1, 2, 3], [], [70000]]
    for row in rows:
        table.append(row)
    assert len(table) == 3
    assert [table[i] for i in range(3)] == rows
    assert [table[i] for i in (-1, -2, -3)] == rows[::-1]


def test_a_prompt_that_is_rendered_already_is_named_once(chat_tokenizer, caplog):
    """Of a text that `apply_chat_template` wrote, and a text with <s>; not of text about another token."""
    bos, eos = chat_tokenizer.bos_token, chat_tokenizer.eos_token
    chat = [{"role": "user", "content": "2+3="}]
    rendered = chat_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompts = [[{"role": "user", "content": text}] for text in ("2+3=", rendered, rendered)]
    tokenization._templated.clear()
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        encode_prompts(chat_tokenizer, prompts[:1], lambda i: f"row {i}")
        assert not caplog.text
        encode_prompts(chat_tokenizer, prompts, lambda i: f"row {i}")
    written = [token for token in (bos, eos, *chat_tokenizer.all_special_tokens) if token and token in rendered]
    assert written and len(caplog.records) == len({*written})
    for record in caplog.records:
        assert record.getMessage().startswith("row 1: the prompt contains ")
        assert "data.prompt_format=text" in record.getMessage()


def test_a_text_prompt_that_begins_with_bos_gets_no_second_one(chat_tokenizer):
    chat_tokenizer.bos_token = chat_tokenizer.bos_token or chat_tokenizer.eos_token
    bos = chat_tokenizer.bos_token
    adds = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, chat_tokenizer.bos_token_id)])
    chat_tokenizer.backend_tokenizer.post_processor = adds
    plain, marked = encode_prompts(chat_tokenizer, ["abc", f"{bos}abc"], str)
    assert plain == marked and plain.count(chat_tokenizer.bos_token_id) == 1
