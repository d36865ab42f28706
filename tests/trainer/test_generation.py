"""main_generation: the model's responses in the order of the prompts, also after a run was killed and resumed."""

import datetime
import json
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.programs import run_python
from verl.data.rlhf_dataset import RLHFDataset
from verl.evaluation import generate
from verl.evaluation.prompts import Responses, SavedResponses, describe_changes, settings_digest
from verl.rollout.hf import HFRollout
from verl.rollout.request import SamplingParams, make_requests
from verl.trainer.main_generation import GenerationRun, main
from verl.utils.rng import fork_seed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def keys(tiny, tmp_path) -> list[str]:
    """Three responses to each of 24 prompts, 5 prompts per batch."""
    return [
        f"data.path={tiny / 'train.jsonl'}",
        "data.n_samples=3",
        "data.batch_size=5",
        f"data.output_path={tmp_path / 'out.parquet'}",
        f"model.path={tiny / 'model'}",
        "rollout.temperature=0.6",
        "rollout.top_p=0.95",
        "rollout.response_length=6",
    ]


def rows_of(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()


# ---- the responses --------------------------------------------------------------------------------------------------


def test_responses_are_those_of_the_model(tiny, keys, tmp_path):
    """Each response again, alone: the prompt tokenized here, the seed from the indices of prompt and sample."""
    out = GenerationRun(overrides=[*keys, "data.max_samples=8"]).run()
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    engine = HFRollout(AutoModelForCausalLM.from_pretrained(tiny / "model"), tokenizer.pad_token_id)
    params = SamplingParams(6, (tokenizer.eos_token_id,), temperature=0.6, top_p=0.95, seed=42)
    rows, inputs = rows_of(out), rows_of(tiny / "train.jsonl")
    assert [{k: row[k] for k in ("prompt", "answer")} for row in rows] == inputs[:8]
    tokens, cut = 0, 0
    for number, row in enumerate(rows):
        ids = tokenizer(row["prompt"])["input_ids"]
        alone = [engine.generate(make_requests([ids], params, [fork_seed(str(number), i)]))[0] for i in range(3)]
        assert row["responses"] == [tokenizer.decode(a.token_ids, skip_special_tokens=True) for a in alone]
        tokens += sum(len(a.token_ids) for a in alone)
        cut += sum(tokenizer.eos_token_id not in a.token_ids for a in alone)
    facts = json.loads((tmp_path / "out.parquet.settings.json").read_text())
    assert {k: v for k, v in facts.items() if k != "settings"} == {
        "prompts": 8,
        "responses": 24,
        "tokens": tokens,
        "cut": cut,
    }
    assert 0 < cut < 24, "the test needs both finish reasons"
    assert len({text for row in rows for text in row["responses"]}) > 18, "samples differ"


def test_greedy_responses_and_prompts_as_in_training(tiny, keys):
    run = GenerationRun(overrides=[*keys, "rollout.temperature=0", "data.n_samples=1", "rollout.top_p=1"])
    trained_on = RLHFDataset(tiny / "train.jsonl", run.tokenizer)
    assert [run.prompts.prompt_ids[i] for i in range(24)] == [item["prompt_ids"] for item in trained_on]
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    for row in rows_of(run.run())[:5]:
        ids = torch.tensor([run.tokenizer(row["prompt"])["input_ids"]])
        for _ in range(6):
            best = model(ids).logits[0, -1].argmax()
            if best == run.tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, best.view(1, 1)], 1)
        assert row["responses"] == [run.tokenizer.decode(ids[0, len(row["prompt"]) :], skip_special_tokens=True)]


def test_batches_do_not_change_the_responses(keys, tmp_path):
    whole = GenerationRun(overrides=[*keys, "data.batch_size=1000"]).run()
    other = tmp_path / "other.jsonl"
    GenerationRun(overrides=[*keys, "data.batch_size=7", f"data.output_path={other}"]).run()
    assert rows_of(other) == rows_of(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "other.jsonl",
        "other.jsonl.settings.json",
        "out.parquet",
        "out.parquet.settings.json",
    ], "the partial file is deleted"


def test_columns_keep_their_types(keys, tmp_path):
    when = pa.array([datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)] * 3, pa.timestamp("us", tz="UTC"))
    columns = {"question": ["ab=", "cd=", "ef="], "small": pa.array([1, 2, None], pa.int8()), "when": when}
    for name in ("a", "b"):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    files = f"data.path=[{tmp_path / 'a.parquet'},{tmp_path / 'b.parquet'}]"
    given = [*keys, files, "data.prompt_key=question", "data.max_samples=4"]
    table = pq.read_table(GenerationRun(overrides=given).run())
    assert table.select(list(columns)).equals(pa.table(columns | {"when": when}).take([0, 1, 2, 0]))
    assert table.schema.field("responses").type == pa.list_(pa.string())
    with pytest.raises(ValueError, match=r"a\.parquet, row 0 .*cannot be written as JSON.*datetime.*\.parquet"):
        GenerationRun(overrides=[*given, f"data.output_path={tmp_path / 'x.jsonl'}"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_two_processes_give_the_same_file(keys, tmp_path, size):
    one = GenerationRun(overrides=keys).run()
    given = [*keys, "trainer.n_gpus_per_node=2", f"data.output_path={tmp_path / 'two.parquet'}"]
    given.append(f"rollout.tensor_model_parallel_size={size}")
    assert rows_of(GenerationRun(overrides=given).run()) == rows_of(one)


# ---- resume ---------------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from verl.trainer.main_generation import main

flush, calls = os.fsync, []

def flush_or_die(file):
    calls.append(file)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(file)

os.fsync = flush_or_die
main(sys.argv[1:])
"""


def test_kill_9_and_resume_give_the_file_of_an_uninterrupted_run(keys, tmp_path, caplog):
    """Killed after the responses to three prompts are written, before they are flushed to disk."""
    single = [*keys, "data.batch_size=1", "data.max_samples=8"]
    expected = GenerationRun(overrides=[*single, f"data.output_path={tmp_path / 'whole.parquet'}"]).run().read_bytes()
    killed = run_python("-c", KILLED, *single, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = tmp_path.glob("out.parquet*")
    with left.open("a") as file:
        file.write('{"prompt": 3, "respon')  # torn
    assert not (tmp_path / "out.parquet").exists()
    caplog.clear()
    with caplog.at_level("INFO", "verl"):
        assert main(single) == 0
    assert "resuming: 3 of 8 prompts are finished" in caplog.text
    assert caplog.text.count("generated ") == 8 - 3  # one line per batch
    assert "[gen]" not in caplog.text
    assert (tmp_path / "out.parquet").read_bytes() == expected


def test_stopped_before_the_output_needs_no_model(keys, tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generate, "write_output", killed)
        with pytest.raises(KeyboardInterrupt):
            GenerationRun(overrides=keys).run()
    run = GenerationRun(overrides=keys)
    assert len(rows_of(run.run())) == 24
    assert run.roles == {}, "no model was loaded"


def test_a_finished_file_is_left_alone(tiny, keys, tmp_path, caplog):
    out = GenerationRun(overrides=keys).run()
    before = out.read_bytes()
    with caplog.at_level("INFO", "verl"):
        assert main(keys) == 0
    assert "nothing to do" in caplog.text
    for other, said in {
        "rollout.top_p=1": "rollout.top_p: 0.95 -> 1.0",
        f"data.path={tiny / 'test.jsonl'}": "prompts (token ids)",
        "trainer.seed=7": "rollout.seed: 42 -> 7",
        "rollout.dtype=bf16": "rollout.dtype: float32 -> bfloat16",
    }.items():
        with pytest.raises(ValueError, match="already exists, generated with other settings") as error:
            GenerationRun(overrides=[*keys, other])
        assert said in str(error.value)
    (tmp_path / "out.parquet.settings.json").unlink()
    with pytest.raises(ValueError, match="already exists, with unknown settings: choose another file"):
        GenerationRun(overrides=keys)
    assert out.read_bytes() == before


def test_replaced_weights_are_another_model(keys, tmp_path, tiny):
    copy = tmp_path / "model"
    copy.mkdir()
    for file in (tiny / "model").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    given = [*keys, f"model.path={copy}"]
    first = GenerationRun(overrides=given).settings()
    assert GenerationRun(overrides=given).settings() == first
    weights = copy / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert "model.path (files)" in describe_changes(first, GenerationRun(overrides=given).settings())


def test_damaged_lines_and_those_of_other_settings_are_not_used(tmp_path):
    def saved(**settings) -> SavedResponses:
        return SavedResponses(tmp_path / "o.parquet", settings, prompts=3, n=2)

    responses = [Responses([f"{i}\u2028a\n", "ü"], [3, 1], ["stop", "length"]) for i in range(3)]
    file = saved(t=1)
    assert file.missing() == [0, 1, 2]
    file.append([0, 2], [responses[0], responses[2]])
    file.append([1], [responses[1]])
    assert file.missing() == [] and file.read() == dict(enumerate(responses))
    whole = file.path.read_text()
    for damage in (whole[:-20], whole.replace(', "ü"', "", 1), whole.replace('"prompt": 1', '"p": 1'), ""):
        file.path.write_text(damage)
        missing = file.missing()
        assert missing
        file.append(missing, [responses[i] for i in missing])
        assert file.missing() == [] and file.read() == dict(enumerate(responses))
    assert saved(t=2).missing() == [0, 1, 2]


def test_digest_depends_on_every_value_and_not_on_the_order():
    assert settings_digest({"a": 1, "b": 2}) == settings_digest({"b": 2, "a": 1})
    assert len({settings_digest({"a": value}) for value in (1, 1.5, "1", None, True, [1])}) == 6


# ---- bad input ------------------------------------------------------------------------------------------------------

BAD = {
    "data.output_path=null": "data.output_path (override 'data.output_path=null'): missing, expected a file that ends",
    "data.output_path=out.csv": "found 'out.csv', expected a file that ends with .parquet or .jsonl",
    "rollout.temperature=0": "found 3 with rollout.temperature 0, which generates the same response 3 times",
    "data.batchsize=3": "data.batch_size",
    "data.n_samples=0": "data.n_samples",
    "data.path=nowhere.parquet": "there is no file 'nowhere.parquet'",
    "data.prompt_key=question": "no column 'question' for the prompt (data.prompt_key)",
    "data.max_samples=0": "expected at least 1 of the 24 prompts",
    "data.output_path=/proc/out.jsonl": "data.output_path: expected a writable folder, found '/proc'",
    "rollout.top_k=0": "found 0, expected int >= 1, or -1 for all tokens",
    "rollout.response_length=5000": "positions (max_position_embeddings): set rollout.response_length=40",
    "model.override_config.hiden_size=1": "did you mean 'hidden_size'?",
    "rollout.prompt_length=4": "prompts are longer than 4 tokens; the first is ",
    "model.path=./nowhere": "there is no folder './nowhere'",
    "model.path=null": "model.path (override 'model.path=null'): missing",
    "rollout.name=trtllm": "'trtllm' is not supported yet: use ",
    "trainer.backend=ray": "ray is not supported by generation without training: use local",
    "trainer.nnodes=2": "generation runs on one host",
    "trainer.device=cuda": "device 'cuda' was requested",
    "imports=nowhere.py": "no file 'nowhere.py'",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_settings_end_in_one_message(override, keys, capsys):
    if override == "trainer.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([*keys, override]) == 1
    error = capsys.readouterr().err
    assert BAD[override] in error and error.startswith("error: ") and "Traceback" not in error


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"prompt": [{"role": "user"}]}, "line 2: expected messages like"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "line 2: the prompt is a chat, but the tokenizer has no chat"),
        ({"prompt": "é="}, "line 2: "),
        ({"prompt": "a=", "responses": ["b"]}, "column 'responses' already exists"),
        ({"prompt": "a=", "images": ["a.png"]}, "line 2: column 'images' has images, video or audio"),
        ({"prompt": "a=", "answer": 7}, "cannot write the rows as parquet, use a file that ends with .jsonl: "),
        ({"prompt": "a=", "answer": "b", "extra_info": {}}, "use a file that ends with .jsonl: Cannot write struct"),
    ],
)
def test_bad_rows_end_in_one_message(row, message, keys, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps(r) + "\n" for r in ({"prompt": "a=", "answer": "a"}, row)))
    assert main([*keys, f"data.path={bad}"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error


def test_help_and_print_config(keys, capsys):
    assert main(["--help"]) == 0
    assert "verl config explain --of generation" in capsys.readouterr().out
    assert main([*keys, "--print-config"]) == 0
    assert "n_samples: 3" in capsys.readouterr().out


def test_dry_run_checks_everything_and_generates_nothing(keys, tmp_path, capsys):
    assert main([*keys, "--dry-run", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "ok  prompts\n" in shown and "ok  earlier output\n" in shown
    assert "would generate 3 responses to each of 24 prompts, of at most 6 tokens, with " in shown
    assert list(tmp_path.iterdir()) == []
    assert main([*keys, "--dry-run", "rollout.prompt_length=4"]) == 1
    assert "prompts are longer than 4 tokens" in capsys.readouterr().err
