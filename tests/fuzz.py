"""Random input, thrown at everything that reads it: `python -m tests.fuzz --cases 20000`, or `make fuzz`.

A case passes if it is accepted, or refused with one of the errors that are meant for users. It fails with any other
exception, if something is written outside of the folder of the case, if a process is started, or if a connection is
opened. Targets: config (overrides and YAML), data (JSONL, JSON, CSV, parquet), checkpoint (manifests and files),
calls (tool calls, responses, records of a run), http (the endpoint of `verl serve`).
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.audit import Guard

# ---- input ----------------------------------------------------------------------------------------------------------

HOSTILE = [
    *("!!python/object/apply:os.system ['touch pwned']", "__import__('os').system('touch pwned')", "${oc.env:HOME}"),
    *("${trainer.seed}", "${a:b}", "${", "../../../../tmp/pwned", "/tmp/pwned", "~/pwned", "a/../../b", "CON", "."),
    *("\x1b]0;title\x07", "\x1b[2J", "a\nb", "\r", "\x00", "\ud800", "\u202e", "\ufeff", "", " ", "\t", "é" * 3),
    *("1e999", "-1", "nan", ".inf", "010", "1:30", "9" * 5000, "0x", "true", "null", "[", "]", "{", "}", "[1,"),
    *("{a: b}", "${a}" * 50, "[" * 300, "{'a': " * 150, "&a [*a, *a]", "- " * 100, "key=value", "a=b=c", "::"),
    *("%s%n{0}", "\\u0000"),
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "<function=f>", "<|python_tag|>", "<think>"),
    *("\\boxed{", "\\frac{1}{0}", "10**10**10", "9^9^9^9", "```python\nimport os\n```", "#### 5", "<script>alert(1)"),
]
texts = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=12), st.lists(st.sampled_from(HOSTILE), max_size=3).map("".join)
)
numbers = st.one_of(st.integers(-3, 9), st.integers(), st.floats(), st.sampled_from([2**63, 10**400, 1e308, -0.0]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


def deep(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def damaged(draw: Callable, content: bytes) -> bytes:
    """Content with a change: bytes flipped, cut, repeated, inserted, or all replaced."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "replace", "keep"]))
    at = draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "flip" and content:
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + draw(st.binary(max_size=6)) + content[at:]
    if kind == "repeat":
        return content[:at] + content[at // 2 :]
    return draw(st.binary(max_size=40)) if kind == "replace" else content


def said(error: BaseException) -> str:
    """What a command prints for a refusal. It must be one line or more of plain text."""
    from verl.trainer.startup.command_line import print_error

    with contextlib.redirect_stderr(io.StringIO()) as shown:
        assert print_error(error) == 1
    text = shown.getvalue()
    assert len(text) > len("error: \n") and all(c.isprintable() or c in "\n\t" for c in text), text
    return text


class Target:
    """Something that reads input. `case` draws one input, and returns whether it was accepted."""

    share = 0.0

    def __init__(self, folder: Path):
        """Load what all cases need, so that the guard sees only the case."""

    def case(self, draw: Callable, folder: Path) -> bool:
        raise NotImplementedError


class Config(Target):
    """Overrides and YAML files."""

    share = 0.4

    def __init__(self, folder: Path):
        from verl.config import Config as Schema
        from verl.config import dump_config, load_config
        from verl.config.fields import fields_of

        self.load, self.dump = load_config, dump_config
        keys = [*fields_of(Schema), *Schema.aliases.names()]
        part = st.sampled_from([*keys, *(key.rpartition(".")[0] for key in keys), "a", "_target_", "__class__", "x.y"])
        self.keys = st.one_of(
            part, st.tuples(st.sampled_from(["+", "++", "~", "--", "", "no."]), part).map("".join), texts
        )
        load_config(None, [])

    def case(self, draw: Callable, folder: Path) -> bool:
        path = None
        overrides = draw(st.lists(st.tuples(self.keys, values.map(_as_override)).map("=".join) | texts, max_size=3))
        if draw(st.booleans()):
            path = folder / "config.yaml"
            nested = draw(st.dictionaries(self.keys, values, max_size=3))
            content = yaml.safe_dump(nested, allow_unicode=True).encode(errors="surrogatepass")
            path.write_bytes(damaged(draw, content))
        try:
            config = self.load(path and str(path), overrides)
        except ValueError as error:
            assert not isinstance(error, UnicodeError), "a file in another encoding is not named"
            said(error)
            return False
        self.dump(config, redact=True)
        self.dump(config, everything=True)
        return True


def _as_override(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


class Data(Target):
    """Files of training data."""

    share = 0.12

    def __init__(self, folder: Path):
        from examples.quickstart.tiny_model import char_tokenizer
        from verl.data.rlhf_dataset import RLHFDataset

        self.tokenizer, self.dataset = char_tokenizer(), RLHFDataset
        (folder / "good.jsonl").write_text('{"prompt": "ab", "answer": "a"}\n')
        len(RLHFDataset(str(folder / "good.jsonl"), self.tokenizer))

    def case(self, draw: Callable, folder: Path) -> bool:
        keys = st.sampled_from(["prompt", "answer", "data_source", "reward_model", "extra_info", "ability", "images"])
        prompts = st.one_of(
            st.text("abcd=", max_size=5),
            values,
            st.lists(st.fixed_dictionaries({}, optional={"role": texts, "content": values}), max_size=2),
        )
        good = st.fixed_dictionaries({"prompt": prompts, "answer": values})
        rows = draw(st.lists(st.one_of(good, st.dictionaries(keys | texts, values, max_size=4), values), max_size=4))
        if draw(st.integers(0, 9)) == 0:
            rows.append({"prompt": "a", "answer": deep(draw(st.sampled_from([150, 900, 3000]))) if rows else 1})
        path = folder / f"rows{draw(st.sampled_from(['.jsonl', '.json', '.csv', '.parquet', '.jsonl', '.txt']))}"
        path.write_bytes(self._content(draw, path.suffix, rows))
        try:
            found = self.dataset(str(path), self.tokenizer, {"max_bad_rows": draw(st.sampled_from([0, 0, 2]))})
            for index in range(len(found)):
                found[index]
        except (ValueError, FileNotFoundError) as error:
            said(error)
            return False
        return True

    @staticmethod
    def _content(draw: Callable, suffix: str, rows: list) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if suffix == ".parquet":
            table = io.BytesIO()
            with contextlib.suppress(Exception):  # rows that are no table
                pq.write_table(pa.Table.from_pylist([row for row in rows if isinstance(row, dict)]), table)
            return damaged(draw, table.getvalue())
        sys.setrecursionlimit(20_000)
        try:
            lines = [json.dumps(row, default=str) for row in rows]
        finally:
            sys.setrecursionlimit(1000)
        text = "\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]"
        if suffix == ".csv":
            text = "prompt,answer\n" + "\n".join(",".join(map(repr, lines)) for _ in range(2))
        return damaged(draw, text.encode(errors="surrogatepass"))


class Checkpoint(Target):
    """Two checkpoints, of which a file of the newer one is damaged, also with a manifest that fits."""

    share = 0.2

    def __init__(self, folder: Path):
        import torch

        from verl.checkpoints.store import CheckpointStore
        from verl.trainer.state.saved_state import load_state, save_state

        self.store, self.load = CheckpointStore, load_state
        self.made = folder / "made"
        store = CheckpointStore(self.made)
        for step in (1, 2):
            with store.writing(step) as written:
                state = {"step": step, "data": {"epoch": 0, "x": (1, b"2")}, "weights": torch.ones(3), "best": None}
                save_state(state, written, "trainer")
        store.mark_best({"step": 1, "metric": "val", "value": 0.5})
        assert load_state(store.latest(), "trainer")["step"] == 2

    def case(self, draw: Callable, folder: Path) -> bool:
        run = folder / "run"
        shutil.copytree(self.made, run, symlinks=True)
        names = ["manifest.json", "trainer.json", "trainer.safetensors"]
        name = draw(
            st.sampled_from([*(f"global_step_2/{n}" for n in names), "best_checkpoint.json", "../run/" + LATEST])
        )
        content = (run / name).read_bytes()
        if name.endswith(".json") and draw(st.booleans()):
            content = json.dumps(_edited(draw, json.loads(content))).encode()
        else:
            content = damaged(draw, content)
        (run / name).write_bytes(content)
        if draw(st.booleans()) and "manifest" not in name and "global_step_2" in name:
            self._seal(run / "global_step_2", Path(name).name, content)
        store = self.store(run, keep=2)
        try:
            store.best()
            latest = store.latest()
            assert latest is not None and latest.parent == run
            state = self.load(latest, "trainer")
            with store.writing(3) as written:
                (written / "x").write_text("x")
        except ValueError as error:
            said(error)
            return False
        return isinstance(state, dict) and latest.name == "global_step_2"

    @staticmethod
    def _seal(folder: Path, name: str, content: bytes) -> None:
        import hashlib

        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))


LATEST = "latest_checkpointed_iteration.txt"


def _edited(draw: Callable, value: Any) -> Any:
    """A JSON value with one part replaced."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: _edited(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _edited(draw, value[at]), *value[at + 1 :]]
    special = [{"$tuple": 1}, {"$bytes": "?"}, {"$tensor": "../x"}, {"$number": ["O", 1]}, {"$array": {}}]
    special += [{"$batch": []}]
    return draw(st.one_of(values.filter(lambda v: v != float("inf")), st.sampled_from(special)))


class Calls(Target):
    """What a policy writes: tool calls, answers to rules, and what the report shows of them."""

    share = 0.23

    def __init__(self, folder: Path):
        from verl.agents.tools.parsers import TOOL_PARSERS
        from verl.rewards.rules.choice import multiple_choice
        from verl.rewards.rules.gsm8k import gsm8k_strict
        from verl.rewards.sandbox.code_tests import extract_code, same_output
        from verl.tracking.report import write_report

        self.parsers = [TOOL_PARSERS[name](None) for name in ("hermes", "qwen", "llama")]
        self.report, self.extract, self.same = write_report, extract_code, same_output
        self.rules = [gsm8k_strict, multiple_choice]

    def case(self, draw: Callable, folder: Path) -> bool:
        calls = [lambda inner: f"<tool_call>{inner}</tool_call>", lambda inner: f"<|python_tag|>{inner}", str]
        inner = st.one_of(
            values.map(lambda value: json.dumps({"name": "f", "arguments": value})),
            st.sampled_from([500, 20_000]).map(lambda n: '{"name": "f", "arguments": ' + "[" * n + "]" * n + "}"),
            st.lists(texts, max_size=4).map("".join),
            texts.map(lambda text: f"<function=f><parameter=a>{text}</parameter></function>"),
        )
        text = "".join(draw(st.lists(st.tuples(st.sampled_from(calls), inner).map(lambda p: p[0](p[1])), max_size=3)))
        found = 0
        for parser in self.parsers:
            content, made = parser.parse(text)
            assert isinstance(content, str)
            for call in made:
                with contextlib.suppress(ValueError):
                    assert isinstance(call.read_arguments(), dict)
                    found += 1
        self.same(self.extract(text), draw(texts))
        for rule in self.rules:
            with contextlib.suppress(ValueError):
                rule("x", text, draw(texts))
        if draw(st.integers(0, 19)) == 0:
            self._record(draw, folder, text)
        return found > 0

    def _record(self, draw: Callable, folder: Path, text: str) -> None:
        sample = {"prompt": text, "response": draw(texts), "score": draw(numbers), "tokens": draw(values)}
        lines = [json.dumps({"step": 1, "critic/score/mean": 0.5}), json.dumps({"step": 2, text: draw(scalars)})]
        (folder / "metrics.jsonl").write_bytes(damaged(draw, "\n".join(lines).encode()))
        (folder / "run.json").write_bytes(damaged(draw, json.dumps({"project": text, "config": {}}).encode()))
        steps = json.dumps({"step": 1, "every": 1, "samples": [sample]})
        (folder / "steps.jsonl").write_bytes(damaged(draw, steps.encode()))
        try:
            page = self.report(folder).read_text(encoding="utf-8")
        except ValueError as error:
            said(error)
            return
        assert "<script>alert" not in page


class Http(Target):
    """Requests to `verl serve`, with a real engine behind it."""

    share = 0.05

    def __init__(self, folder: Path):
        from starlette.testclient import TestClient

        from examples.quickstart.tiny_model import tiny_model
        from verl.cli.serve import load
        from verl.server.app import make_app
        from verl.server.service import EngineLoop

        model = tiny_model("qwen2", folder / "model")
        self.loading = load({"name": "native"}, {"path": str(model), "template": None}, "cpu", (256, 8), "tiny")
        engine, served = self.loading.__enter__()
        app = make_app(served, "the-key", generator=EngineLoop(engine), max_body=100_000)
        self.client = TestClient(app, raise_server_exceptions=True)
        self.client.__enter__()
        message = {"role": "user", "content": "hi"}
        good = self.client.post("/v1/chat/completions", json={"model": "tiny", "messages": [message]}, headers=KEY)
        assert good.status_code == 200, good.text

    def case(self, draw: Callable, folder: Path) -> bool:
        path = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/models", "/x", "/v1/../health"]))
        message = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "x"]), "content": values})
        names = ("n", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stream", "tools")
        names += ("return_token_ids",)
        options = dict.fromkeys(names, values) | {"max_tokens": st.one_of(values, st.just(2))}
        fields = {"messages": st.one_of(st.lists(message, max_size=2), values), "prompt": values, **options}
        body = draw(st.one_of(st.fixed_dictionaries({"model": st.just("tiny")}, optional=fields), values))
        content = json.dumps(body)
        if draw(st.integers(0, 3)) == 0:
            content = damaged(draw, content.encode())
        headers = draw(st.sampled_from([KEY, KEY, KEY, {"Authorization": "Bearer x"}, {}]))
        method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "DELETE"]))
        answer = self.client.request(method, path, content=content, headers=headers)
        assert answer.status_code < 500, (answer.status_code, answer.text[:500])
        assert headers == KEY or answer.status_code == 401 or path.endswith("health"), answer.status_code
        return answer.status_code == 200


PHASES = [Phase.generate, Phase.shrink]
KEY = {"Authorization": "Bearer the-key"}
TARGETS = {"config": Config, "data": Data, "checkpoint": Checkpoint, "calls": Calls, "http": Http}


def fuzz(name: str, cases: int, first_seed: int = 0, guard: Guard | None = None) -> Counter:
    """Run cases of a target. Raises the first failure, with the input that `hypothesis` has made small."""
    found: Counter = Counter()
    guard = guard or Guard()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = Path(work).resolve()
        target = TARGETS[name](here)

        @seed(first_seed)
        @settings(max_examples=cases, database=None, deadline=None, phases=PHASES, suppress_health_check=[*HealthCheck])
        @given(st.data())
        def run(data: st.DataObject) -> None:
            folder = here / "case"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            before, state = os.getcwd(), random.getstate()

            def draw(strategy: st.SearchStrategy) -> Any:
                with guard.paused():
                    return data.draw(strategy)

            with guard.watching(here):
                accepted = target.case(draw, folder)
            assert os.getcwd() == before and not Path("pwned").exists() and not Path("/tmp/pwned").exists()
            assert random.getstate() == state or name == "http"
            found["accepted" if accepted else "refused"] += 1
            if found.total() % 250 == 0:
                print(f"{name}: {found.total()} cases so far", flush=True)

        run()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="only this one; can be repeated")
    given = parser.parse_args()
    chosen, failed, guard = given.target or list(TARGETS), 0, Guard()
    whole = sum(TARGETS[name].share for name in chosen)
    import logging

    logging.disable(logging.CRITICAL)
    for name in chosen:
        start, cases = time.monotonic(), max(1, round(given.cases * TARGETS[name].share / whole))
        try:
            found = fuzz(name, cases, given.seed, guard)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            import traceback

            traceback.print_exception(error)
            print(f"{name}: FAILED")
            failed += 1
            continue
        print(f"{name}: {cases} cases, {dict(found)}, {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
