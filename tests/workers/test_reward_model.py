"""The reward model's scores are those of plain transformers on the text, whatever tokenizer, packing, micro-batch."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.quickstart.tiny_model import tiny_model
from verl.config import schema
from verl.data.chat import DialogueReader
from verl.data.sequences import build_sequences
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup, WorkerSpec
from verl.workers.reward_model import RewardModelWorker

PROMPTS = ["abc=", "a+b", "jihgf=", "0*(1-2)=", "d"]
ANSWERS = ["abc", "", "fgh12345", "(9)", "aa"]


def reward_model(folder, kind: str, labels: int = 1):
    """A random classifier of a family, with the family's tokenizer."""
    tiny_model(kind, folder, seed=3)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> folder: llama with one token a character and no template, qwen2 with BPE and a chat template."""
    return {kind: reward_model(tmp_path_factory.mktemp(kind), kind) for kind in ("llama", "qwen2")}


def batch_of(tokenizer, prompts: list, answers: list[str], texts: list[str]) -> DataProto:
    """A batch as generation leaves it; answers end with the eos token. texts: the prompts as the policy got them."""
    prompt_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for answer in answers]
    columns = build_sequences(prompt_ids, ids, tokenizer.pad_token_id)
    return DataProto.from_dict(columns, {"raw_prompt": prompts})


def scores(folder, policy, batch: DataProto, **settings) -> torch.Tensor:
    config = schema.RewardModelConfig(enable=True, model_path=str(folder), **settings)
    spec = WorkerSpec(RewardModelWorker, {"config": config, "device": "cpu", "policy_tokenizer": policy})
    return LocalWorkerGroup(spec).compute_rm_score(batch).batch["rm_scores"]


def expected(folder, texts: list[str]) -> torch.Tensor:
    """Each text alone through transformers' own classifier."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        encoded = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
        return torch.stack([model(input_ids=one["input_ids"]).logits[0, 0] for one in encoded])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size_per_gpu": 2},
        {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 24},
        {"use_remove_padding": False, "micro_batch_size_per_gpu": 3},
    ],
)
def test_the_policys_own_tokens_where_the_tokenizers_are_the_same(models, settings):
    policy = AutoTokenizer.from_pretrained(models["llama"])
    batch = batch_of(policy, PROMPTS, ANSWERS, PROMPTS)
    found = scores(models["llama"], policy, batch, **settings)
    texts = [prompt + answer + policy.eos_token for prompt, answer in zip(PROMPTS, ANSWERS)]
    assert torch.allclose(found.sum(1), expected(models["llama"], texts), rtol=1e-4, atol=1e-5)
    assert found.sum(1).unique().numel() == len(PROMPTS)
    last = batch.batch["response_mask"].sum(1) - 1
    assert [row.nonzero().flatten().tolist() for row in found] == [[t] for t in last.tolist()]


def test_another_tokenizer_reads_the_dialogue_by_its_own_template(models):
    policy = AutoTokenizer.from_pretrained(models["llama"])
    batch = batch_of(policy, PROMPTS, ANSWERS, PROMPTS)
    found = scores(models["qwen2"], policy, batch)
    texts = [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for prompt, answer in zip(PROMPTS, ANSWERS)
    ]
    assert torch.allclose(found.sum(1), expected(models["qwen2"], texts), rtol=1e-4, atol=1e-5)


def test_messages_keep_their_roles(models):
    policy = AutoTokenizer.from_pretrained(models["llama"])
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc="}]
    batch = batch_of(policy, [chat], ["abc"], ["abc="])
    text = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nabc=<|im_end|>\n"
        "<|im_start|>assistant\nabc<|im_end|>\n"
    )
    found = scores(models["qwen2"], policy, batch)
    assert torch.allclose(found.sum(1), expected(models["qwen2"], [text]), rtol=1e-4, atol=1e-5)


def test_the_same_tokens_under_another_template_are_tokenized_again(models):
    policy = AutoTokenizer.from_pretrained(models["qwen2"])
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    batch = batch_of(policy, ["one?"], ["two"], ["one?"])
    found = scores(models["qwen2"], policy, batch, custom_chat_template=template)
    assert torch.allclose(found.sum(1), expected(models["qwen2"], ["[user] one?\n[assistant] two\n"]), atol=1e-5)


def test_the_bos_token_of_a_dialogue_is_that_of_the_template(models):
    char, bpe = (AutoTokenizer.from_pretrained(models[kind]) for kind in ("llama", "qwen2"))
    bos = bpe.pad_token, bpe.pad_token_id
    bpe.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    bpe.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    (ids,) = DialogueReader(char, bpe)(batch_of(char, ["abc="], ["ab"], ["abc="]))
    assert bpe.decode(ids) == "[abc=][ab]"


def test_what_cannot_be_read_is_said(models):
    char, bpe = (AutoTokenizer.from_pretrained(models[kind]) for kind in ("llama", "qwen2"))
    chat = [{"role": "user", "content": "abc="}]
    with pytest.raises(ValueError, match=r"prompts are chats.*reward_model\.custom_chat_template"):
        DialogueReader(bpe, char)(batch_of(bpe, [chat], ["abc"], ["abc="]))
    with pytest.raises(ValueError, match="must have a column 'raw_prompt'"):
        DialogueReader(char, bpe)(batch_of(char, ["abc="], ["abc"], ["abc="]).drop("raw_prompt"))


def test_a_model_that_is_no_reward_model_is_refused(models, tmp_path):
    policy = AutoTokenizer.from_pretrained(models["llama"])
    batch = batch_of(policy, PROMPTS, ANSWERS, PROMPTS)
    with pytest.raises(ValueError, match=r"expected a reward model.*found \['LlamaForCausalLM'\]"):
        scores(tiny_model("llama", tmp_path / "policy"), policy, batch)
    with pytest.raises(ValueError, match=r"found .* with 3 labels"):
        scores(reward_model(tmp_path / "three", "llama", labels=3), policy, batch)
