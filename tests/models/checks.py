"""What must hold for every family, through the public path of the project, in float32.

Each check compares with plain transformers, one row at a time: no packing, no cache, eager attention. It returns "yes",
or "padded" if the engine pads what it usually packs, raises AssertionError for a wrong result, and ValueError if the
project refuses the model.
"""

import functools
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.engines.ranks import run_on_ranks
from tests.models.families import FAMILIES
from tests.models.tiny import VOCABULARY, save_config, tiny_config, tiny_model
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import EngineSpec, MicroBatching, TrainEngine, make_engine
from verl.model_merger.merge import MergeOptions, merge
from verl.protocol import DataProto
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.request import SamplingParams, make_requests
from verl.workers.engine_worker import aggregation, sft_objective

#: largest difference of a log-prob in float32: those of a tiny model are -3 to -10, and layers sum in another order
LOG_PROBS = 2e-5
#: the same where the arithmetic differs: token by token in a rollout, or with merged weights
TWO_WAYS = 5e-5
#: largest difference of a gradient, relative to its norm
GRADIENTS = 1e-4

#: lengths of prompts and responses: rows 0 to 2 share a prompt; rows are longer than windows and chunks of `tiny.SIZES`
_PROMPTS = (11, 11, 11, 4, 9, 6)
_RESPONSES = (9, 3, 13, 10, 1, 7)


@dataclass(frozen=True)
class Saved:
    """A tiny model in memory and on disk.

    Attributes:
        module: the model of transformers that was saved, with eager attention.
        path: folder with the weights.
        described: folder with config.json only.
    """

    module: torch.nn.Module
    path: str
    described: str


def load(path: str | Path) -> torch.nn.Module:
    """A folder, loaded by transformers: eager attention, float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def save_family(name: str, folder: Path) -> Saved:
    """Save the tiny model of a row of `FAMILIES`."""
    row = dict(FAMILIES[name])
    config = tiny_config(row.pop("model_type", name), row)
    module = tiny_model(config)
    module.save_pretrained(folder / "model")
    described = save_config(module, folder / "described")
    module.set_attn_implementation("eager")
    module.requires_grad_(True)  # transformers does not freeze the sinusoids of a model that it loads
    return Saved(module, str(folder / "model"), described)


# ---- what is compared -----------------------------------------------------------------------------------------------


@functools.cache
def sequences() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses without special tokens."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    shared = draw(_PROMPTS[0])
    prompts = [shared if row < 3 else draw(length) for row, length in enumerate(_PROMPTS)]
    return prompts, [draw(length) for length in _RESPONSES]


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> DataProto:
    """The columns of an update."""
    return DataProto.from_dict(build_sequences(prompts, responses, pad_token_id=0))


def log_probs_alone(
    module: torch.nn.Module, prompts: list[list[int]], responses: list[list[int]]
) -> list[torch.Tensor]:
    """Log-probs of each response by one forward pass of transformers over its row, float64."""
    result = []
    for prompt, response in zip(prompts, responses):
        ids = torch.tensor([prompt + response], device=module.device)
        every = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        result.append(every.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return result


def assert_log_probs(
    computed: torch.Tensor,
    expected: list[torch.Tensor],
    name: str = "engine and transformers",
    bound: float = LOG_PROBS,
) -> None:
    """computed: (B, T), 0 after the response. name: of the two."""
    for row, values in enumerate(expected):
        gap = (computed[row, : len(values)].double() - values.detach()).abs().max().item()
        assert gap <= bound, f"{name}: log-probs of row {row} differ by up to {gap:.2g}"


def assert_gradients(computed: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Parameters by name; one without a gradient is missing or 0."""
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    for key in computed.keys() | expected.keys():
        zero = torch.zeros(())
        gap = (computed.get(key, zero) - expected.get(key, zero)).norm() / total
        assert gap <= GRADIENTS, f"the gradient of {key} differs by {gap:.2g} of the norm of the gradient"


def train_engine(path: str, optimizer: schema.OptimConfig | None = None, **model: Any) -> TrainEngine:
    """The engine of strategy=fsdp on one CPU. model: keys of the `model` section."""
    spec = EngineSpec("causal_lm", schema.ModelConfig(path=path, **model), schema.EngineConfig(dtype="fp32"), optimizer)
    return make_engine("fsdp", spec)


@contextmanager
def gradients(engine: TrainEngine):
    """Collects the gradients of the next update by name: {} -> filled."""
    collected: dict[str, torch.Tensor] = {}

    def collect(*_: Any) -> None:
        named = engine.module.named_parameters()
        collected.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    handle = engine.optimizer.register_step_pre_hook(collect)
    yield collected
    handle.remove()


def sft_gradients(engine: TrainEngine, batch: DataProto) -> dict[str, torch.Tensor]:
    """The gradient of an SFT update, of which the learning rate is 0."""
    with gradients(engine) as collected:
        agg = aggregation("token-mean", batch.batch["response_mask"], engine)
        engine.train_batch(batch, sft_objective(agg), MicroBatching())
    return collected


def sft_gradients_alone(module: torch.nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of each row, and the gradient of the mean negative log-likelihood, by transformers."""
    module.zero_grad()
    expected = log_probs_alone(module, *sequences())
    (-torch.cat(expected).mean()).backward()
    return expected, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


ADAPTERS = {"lora_rank": 4, "lora_alpha": 8}
NO_UPDATE = schema.OptimConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9)
# with a large epsilon an update is proportional to the gradient; AdamW otherwise scales up the float32 noise of
# gradients that are nearly 0
UPDATE = schema.OptimConfig(lr=0.01, weight_decay=0.0, clip_grad=1.0, override_optimizer_config={"eps": 1.0})


# ---- the checks -----------------------------------------------------------------------------------------------------


def check_training(saved: Saved, **model: Any) -> str:
    """(a) Log-probs and SFT gradients of all rows in one forward pass are those of each row alone.

    One forward pass: packed, with the prompt of three rows computed once; or padded. model: keys of that section.
    """
    expected, expected_gradients = sft_gradients_alone(saved.module)
    engine = train_engine(saved.path, NO_UPDATE, **model)
    batch = batch_of(*sequences())
    assert_log_probs(log_probs_of(engine, batch), expected)
    assert_gradients(sft_gradients(engine, batch), expected_gradients)
    return "yes" if engine.packs else "padded"


def check_rollout(saved: Saved, name: str) -> str:
    """(b) The rollout engine reports the log-probs of its tokens that training computes, and transformers too."""
    engine = train_engine(saved.path)
    prompts, _ = sequences()
    rollout = make_rollout_engine(
        name,
        schema.RolloutConfig(name=name, prompt_length=16, response_length=16),
        engine.spec.model,
        RolloutEnv(0, 1, 0, torch.device("cpu"), 0, compute_dtype=torch.float32),
        engine,
    )
    completions = rollout.generate(make_requests(prompts, SamplingParams(14, (2,), seed=3)))
    responses = [list(completion.token_ids) for completion in completions]
    sampled = [torch.tensor(completion.log_probs).double() for completion in completions]
    training = engine.infer(batch_of(prompts, responses), ("log_probs",), MicroBatching())["log_probs"]
    assert_log_probs(training, sampled, "rollout and training", TWO_WAYS)
    with torch.no_grad():
        assert_log_probs(training, log_probs_alone(saved.module, prompts, responses), bound=TWO_WAYS)
    return "yes"


def check_lora(saved: Saved) -> str:
    """(d) Adapters with default settings train, nothing else changes, and the merged model is the adapted one."""
    engine = train_engine(saved.path, UPDATE, **ADAPTERS)
    batch = batch_of(*sequences())
    before = {name: tensor.clone() for name, tensor in engine.adapters.base()}
    initial = log_probs_of(engine, batch)
    sft_updates(engine, batch, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.adapters.base()), "a base weight changed"
    trained = log_probs_of(engine, batch)
    assert (trained - initial).abs().max() > 1e-6, "the update changed nothing"
    with engine.reference():
        assert torch.equal(log_probs_of(engine, batch), initial), "the reference policy is not the initial one"
    assert_merged(engine, trained)
    return "yes"


def check_checkpoint(saved: Saved) -> str:
    """(e) A resumed run continues as the first one does, and the merged checkpoint is the trained model."""
    batch = batch_of(*sequences())
    engine, resumed = (train_engine(saved.path, UPDATE) for _ in range(2))
    sft_updates(engine, batch, 1)
    with tempfile.TemporaryDirectory() as folder:
        engine.save(Path(folder), ("model", "optimizer", "extra"))
        resumed.load(Path(folder), ("model", "optimizer", "extra"))
    for each in (engine, resumed):
        sft_updates(each, batch, 1)
    trained = log_probs_of(engine, batch)
    assert torch.equal(log_probs_of(resumed, batch), trained), "the resumed run differs"
    assert_merged(engine, trained)
    return "yes"


def log_probs_of(engine: TrainEngine, batch: DataProto) -> torch.Tensor:
    """(B, T)."""
    return engine.infer(batch, ("log_probs",), MicroBatching())["log_probs"]


def sft_updates(engine: TrainEngine, batch: DataProto, steps: int) -> list[float]:
    """The norm of the gradient in each update."""
    norms = []
    for _ in range(steps):
        agg = aggregation("token-mean", batch.batch["response_mask"], engine)
        norms.append(engine.train_batch(batch, sft_objective(agg), MicroBatching())["grad_norm"])
        engine.lr_step()
    return norms


def assert_merged(engine: TrainEngine, trained: torch.Tensor) -> None:
    """The checkpoint, merged by `verl merge` and loaded by transformers, has the log-probs of the engine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine.save(folder / "actor", ("model",))
        merge(MergeOptions(folder / "actor", folder / "merged"))
        with torch.no_grad():
            expected = log_probs_alone(load(folder / "merged"), *sequences())
    assert_log_probs(trained, expected, "trained and merged", TWO_WAYS)


# ---- two processes --------------------------------------------------------------------------------------------------


def results_on_ranks(path: str, sharded: bool = True) -> dict[str, Any]:
    """Two updates with this rank's rows: the norms of the gradients, and the log-probs then."""
    spec = EngineSpec(
        "causal_lm",
        schema.ModelConfig(path=path),
        schema.EngineConfig(dtype="fp32"),
        UPDATE,
        world_size=2 if sharded else 1,
    )
    engine = make_engine("fsdp", spec)
    share = batch_of(*sequences()).chunk(engine.dp_size)[engine.dp_rank]
    norms = sft_updates(engine, share, 2)
    names = [name for name, _ in engine.weights()]
    return {"norms": norms, "log_probs": log_probs_of(engine, share), "weights": names}


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """The result, or the error: a process of a rank sends either."""
    try:
        return function(*args)
    except Exception as error:
        return (
            ValueError(str(error))
            if isinstance(error, ValueError)
            else RuntimeError(f"{type(error).__name__}: {error}")
        )


def check_ranks(saved: Saved) -> str:
    """(c) Two processes with sharded weights train as one does."""
    alone = results_on_ranks(saved.path, sharded=False)
    ranks = run_on_ranks(2, attempt, results_on_ranks, saved.path)
    for rank in ranks:
        if isinstance(rank, Exception):
            raise rank
    assert all(rank["weights"] == alone["weights"] for rank in ranks), "the weights have other names"
    for rank in ranks:
        for norm, expected in zip(rank["norms"], alone["norms"]):
            assert abs(norm - expected) <= GRADIENTS * expected, f"the gradient has norm {norm}, alone {expected}"
    gap = (torch.cat([rank["log_probs"] for rank in ranks]) - alone["log_probs"]).abs().max().item()
    assert gap <= 5 * LOG_PROBS, f"the log-probs after two updates differ by up to {gap:.2g}"
    return "yes"
