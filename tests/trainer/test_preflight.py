"""The checks before the first step: all in one list, each once, and `--dry-run` stops after them."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from examples.quickstart.tiny_model import tiny_model
from tests.models.families import FAMILIES
from tests.models.tiny import tiny_config
from verl.algorithms.policy_losses import register_policy_loss
from verl.config import ConfigError, schema
from verl.config.public.upstream import upstream_engines
from verl.engines.loading import log_padding
from verl.engines.traits import built_in_strategies
from verl.recipe.dapo.main_dapo import DAPOTrainer
from verl.rollout.traits import built_in_engines
from verl.single_controller.cluster import make_cluster
from verl.single_controller.local.cluster import InProcessCluster, ProcessCluster
from verl.trainer import main_ppo, sft_trainer
from verl.trainer.checks import preflight
from verl.trainer.checks.preflight import CHECKS, CONFIG, FLOW, IMPORTS, INPUTS, SETTINGS, Recipe
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer


def lines_of_checks(shown: str) -> list[str]:
    return [line.removeprefix("ok  ") for line in shown.splitlines() if line.startswith("ok  ")]


def test_a_dry_run_of_main_ppo_prints_the_checks_and_the_plan(settings, tmp_path, capsys, forbid_workers):
    assert main_ppo.main([*settings, "algorithm.name=grpo", "--dry-run"]) == 0
    names = [check.name for check in CHECKS if issubclass(schema.Config, check.schemas)]
    assert lines_of_checks(capsys.readouterr().out) == [f"{len(names)} checks (--verbose: their names)"]
    assert main_ppo.main([*settings, "algorithm.name=grpo", "--dry-run", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert lines_of_checks(shown) == names
    plan = next(line for line in shown.splitlines() if line.startswith("would train "))
    assert "180 steps of grpo from " in plan and "with 1 process on the local backend" in plan
    topics = dict(re.findall(r"^  (\w+): +(.+)$", shown, re.MULTILINE))
    assert [*topics] == ["batch", "data", "flow", "checkpoints"]
    assert topics["flow"].startswith("prompts -> repeat -> gen") and topics["checkpoints"].startswith("never, in ")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_recipe(settings, capsys, forbid_workers):
    further = ["reward.reward_kwargs.overlong_buffer.len=4", "trainer.n_gpus_per_node=2", "trainer.save_freq=5"]
    assert main_ppo.main([*settings, *further, "--dry-run"], trainer=DAPOTrainer) == 0
    shown = capsys.readouterr().out
    plan = next(line for line in shown.splitlines() if line.startswith("would train "))
    assert "steps of DAPO from" in plan and "with 2 processes" in plan
    assert "\n  checkpoints: every 5 steps" in shown


def test_a_dry_run_of_sft(tiny, tmp_path, capsys, forbid_workers):
    settings = [f"data.train_files={tiny / 'train.jsonl'}", "data.prompt_key=prompt", "data.response_key=answer"]
    settings += ["data.train_batch_size=4", f"model.path={tiny / 'model'}", f"trainer.default_local_dir={tmp_path}/run"]
    assert sft_trainer.main([*settings, "--dry-run", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert {"files exist", "model limits", "cluster"} <= set(lines_of_checks(shown))
    assert "group size" not in shown and "would train 24 steps of SFT from" in shown


def subclass(**attributes) -> type[PPOTrainer]:
    return type("Mine", (PPOTrainer,), attributes)


WITHOUT_FILE, WITHOUT_RECIPE = subclass(recipe=Recipe(settings=Path("nowhere.yaml"))), subclass(recipe=None)
NO_RECIPE = "Mine.recipe: expected a Recipe, found None: remove it"


@pytest.mark.parametrize(
    ("trainer", "arguments", "words"),
    [
        (None, ["--verbose"], ["--verbose lists the checks of --dry-run"]),
        (None, ["algorithm.adv_estimator=grop", "--dry-run"], ["did you mean 'grpo'?"]),
        (None, ["algorithm.name=prime", "--dry-run"],
         ["'adv' reads 'rm_scores'", "run python -m verl.recipe.prime.main_prime"]),
        (DAPOTrainer, ["data.max_response_length=16", "reward.reward_kwargs.overlong_buffer.len=20", "--dry-run"],
         ["set reward.reward_kwargs.overlong_buffer.len=4, or reward.reward_kwargs.overlong_buffer.enable=false"]),
        *((WITHOUT_FILE, [flag], ["nowhere.yaml"]) for flag in ("--dry-run", "--print-config")),
        *((WITHOUT_RECIPE, flags, [NO_RECIPE]) for flags in ([], ["--print-config"])),
    ],
)  # fmt: skip
def test_a_command_fails_with_a_message(trainer, arguments, words, settings, capsys):
    assert main_ppo.main([*settings, *arguments], trainer=trainer) == 1
    shown = capsys.readouterr().err
    assert all(text in shown for text in words), shown


def test_the_list_is_in_the_order_of_its_stages():
    stages = (SETTINGS, IMPORTS, CONFIG, INPUTS, FLOW)
    assert [check.stage for check in CHECKS] == sorted((check.stage for check in CHECKS), key=stages.index)


def test_settings_are_read_once_and_no_check_runs_twice(settings, monkeypatch):
    calls: Counter[str] = Counter()
    call, read = preflight.Check.__call__, preflight.read_config

    def counted(check, run):
        calls[check.name] += 1
        return call(check, run)

    def counted_read(*args, **kwargs):
        calls["read"] += 1
        return read(*args, **kwargs)

    monkeypatch.setattr(preflight.Check, "__call__", counted)
    monkeypatch.setattr(preflight, "read_config", counted_read)
    names = [check.name for check in CHECKS if issubclass(schema.Config, check.schemas)]
    trainer = PPOTrainer(overrides=settings)
    assert trainer.passed_checks() == names
    assert calls == dict.fromkeys(("read", *names), 1)
    calls.clear()
    assert main_ppo.main([*settings, "--dry-run"]) == 0
    assert calls == dict.fromkeys(("read", *names), 1)


def test_the_cluster_follows_the_settings(settings):
    assert isinstance(PPOTrainer(overrides=settings).cluster, InProcessCluster)
    for further in ("trainer.n_gpus_per_node=2", "trainer.worker_env.X=1"):
        assert isinstance(PPOTrainer(overrides=[*settings, further]).cluster, ProcessCluster)


def test_a_given_cluster_is_used(settings):
    """An object with the methods of `Cluster` is enough."""
    events = []

    class Recording:
        def __init__(self):
            self.inner = InProcessCluster()

        def check(self, config):
            events.append("check")

        def start(self, pools, specs):
            events.append((list(pools), sorted(specs)))
            return self.inner.start(pools, specs)

        def shutdown(self):
            events.append("shutdown")

    settings = [*settings, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"]
    trainer = PPOTrainer(overrides=settings, cluster=Recording())
    assert trainer.fit()["training/global_step"] == 1
    assert events == ["check", (["actor"], ["actor"])]  # in this process, the model stays for a further fit
    trainer.shutdown()
    assert events[2:] == ["shutdown"]


def test_one_process_has_one_process(settings):
    with pytest.raises(ValueError, match=r"local_roles is \['critic'\], but all roles run in this process: remove it"):
        PPOTrainer(overrides=[*settings, "algorithm.name=ppo", "placement.local_roles=[critic]"])
    with pytest.raises(ValueError, match="InProcessCluster has one process"):
        PPOTrainer(overrides=[*settings, "trainer.n_gpus_per_node=2"], cluster=InProcessCluster())
    config = PPOTrainer(overrides=settings).config
    with pytest.raises(KeyError):
        make_cluster(config, "slurm")


def test_the_hook_before_the_first_step_comes_after_the_checkpoint(settings, tmp_path):
    class Hooked(LocalPPOTrainer):
        def before_first_step(self):
            self.seen = (self.global_step, sorted(self.roles))

    chosen = [*settings, "algorithm.adv_estimator=grpo", "trainer.save_freq=1"]
    for steps in (1, 2):
        trainer = Hooked(overrides=[*chosen, f"trainer.total_training_steps={steps}"])
        trainer.fit()
        assert trainer.seen == (steps - 1, ["actor", "rollout"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"config_path": "x.yaml"}, ValueError, "config and config_path are the same argument"),
        ({"config": "a=b"}, TypeError, r"expected a file, found 'a=b': for keys, use overrides=\['a=b'\]"),
        ({"config": "x.yaml"}, ConfigError, r"there is no file 'x\.yaml'"),
        ({"config": 3}, TypeError, "expected a Config, a dict or the path of a YAML file, found int"),
        ({"config": schema.SFTConfig()}, TypeError, r"expected a Config, .* found SFTConfig"),
        ({"config": None, "overrides": {"a.b": 1}}, ConfigError, r"a.b \(overrides\): unknown key"),
        ({"config": None, "overrides": "a=b"}, TypeError, r"found the string 'a=b': use overrides=\['a=b'\]"),
    ],
)
def test_settings_that_would_be_ignored_or_are_of_another_type(given, error, message):
    with pytest.raises(error, match=message):
        PPOTrainer(**{"config": schema.Config(), **given})


def test_sft_refuses_them_as_well():
    with pytest.raises(TypeError, match=r"expected a SFTConfig, .* found Config"):
        sft_trainer.SFTTrainer(schema.Config())


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda log_prob, advantages, response_mask: None, "'advantages', 'log_prob', 'response_mask'"),
        (lambda log_prob, config, **kwargs: None, "'config', 'log_prob'"),
        (lambda **kwargs: None, ""),
    ],
)
def test_a_loss_that_cannot_be_aggregated(settings, loss, found):
    register_policy_loss("mine")(loss)
    with pytest.raises(ValueError, match=rf"loss_mode=mine: expected .* found \[{found}\] .* return agg_loss\("):
        PPOTrainer(overrides=[*settings, "actor_rollout_ref.actor.policy_loss.loss_mode=mine"])


def test_a_loss_may_read_all_columns_at_once(settings):
    register_policy_loss("mine")(lambda columns: None)
    PPOTrainer(overrides=[*settings, "actor_rollout_ref.actor.policy_loss.loss_mode=mine"])


def test_a_backend_of_a_subclass(settings):
    with pytest.raises(ValueError, match="no backend is called 'rya': did you mean 'ray'"):
        subclass(backend="rya")(overrides=settings)


@pytest.mark.parametrize("trainer", [dict, object(), LocalPPOTrainer.__init__])
def test_main_takes_a_subclass_of_the_trainer(trainer):
    with pytest.raises(TypeError, match=r"trainer: expected a subclass of PPOTrainer .*, found"):
        main_ppo.main(["--dry-run"], trainer=trainer)


def edit_json(path: Path, edit: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def swap_letters(folder: Path) -> None:
    def swap(tokenizer: dict) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit_json(folder / "tokenizer.json", swap)


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


OTHER_TOKENIZER = (
    r"the critic has another tokenizer than the policy: \d+ of 32 token ids differ: id 0 is '<pad>' for '.*"
)
CRITICS = {
    rf"{OTHER_TOKENIZER}'. The critic reads the ": lambda at: tiny_model("qwen2", at, tokenizer="bpe", seed=0),
    r"2 of 32 token ids differ: id \d+ is 'a' for .* and 'b' for ": swap_letters,
    r"critic '.*': the tokenizer produces token id \d+, but .* ids 0 to 19": lambda at: edit_json(
        at / "config.json", lambda config: config.update(vocab_size=20)
    ),
}


@pytest.mark.parametrize("message", CRITICS)
def test_a_critic_that_reads_other_tokens_is_refused(message, settings, tiny, tmp_path, forbid_workers):
    CRITICS[message](shutil.copytree(tiny / "model", tmp_path / "critic"))
    with pytest.raises(ValueError, match=message):
        LocalPPOTrainer(overrides=[*settings, "algorithm.name=ppo", f"critic.model.path={tmp_path / 'critic'}"])


def test_a_critic_with_the_same_tokenizer_or_none(settings, tiny, tmp_path, forbid_workers, caplog):
    copy = shutil.copytree(tiny / "model", tmp_path / "copy")
    run = [*settings, "algorithm.name=ppo", f"critic.model.path={copy}"]
    LocalPPOTrainer(overrides=run)
    assert "tokenizer" not in caplog.text
    remove_tokenizer(copy)
    LocalPPOTrainer(overrides=run)
    assert f"critic {str(copy)!r} has no tokenizer to compare with that of the policy" in caplog.text


def test_a_model_of_another_kind_is_refused_by_name(settings, tiny, tmp_path, capsys, forbid_workers):
    from transformers import ViTConfig

    message = "ViTConfig has no CausalLM model"
    shutil.copytree(tiny / "model", tmp_path / "model")
    ViTConfig().save_pretrained(tmp_path / "model")
    assert main_ppo.main([*settings, "algorithm.name=grpo", f"actor_rollout_ref.model.path={tmp_path / 'model'}"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("error:") == 1 and message in shown and "AutoModel" not in shown and "Traceback" not in shown


def without_weights(family, tiny, folder) -> str:
    """A folder with the tokenizer of the settings and the config.json of a tiny model of a family."""
    shutil.copytree(tiny / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = tiny_config(family, {**FAMILIES[family], "vocab_size": 32})
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return str(folder)


ULYSSES, TENSOR = "fsdp_config.ulysses_sequence_parallel_size=2", "fsdp_config.tensor_parallel_size=2"
EXPERTS = "fsdp_config.expert_parallel_size=2"
DETERMINISTIC = "actor_rollout_ref.rollout.deterministic=true"
REPLAY = "actor_rollout_ref.actor.router_replay.mode=R2"


@pytest.mark.parametrize(
    ("family", "override", "message"),
    [
        ("mamba2", DETERMINISTIC, "Mamba2ForCausalLM pads its rows, for which there are no batch-invariant kernels"),
        ("qwen3_moe", DETERMINISTIC, "Qwen3MoeForCausalLM is a mixture of experts, for which there are no batch-"),
        ("deepseek_v3", DETERMINISTIC, "not supported for DeepseekV3ForCausalLM, which has no fused layers: use false"),
        ("mamba2", f"actor_rollout_ref.actor.{ULYSSES}", "those of Mamba2ForCausalLM are padded: it has layers of "),
        ("deepseek_v3", f"actor_rollout_ref.actor.{TENSOR}", "a DeepseekV3Experts, as 'moe_tp_experts', which is not "),
        ("deepseek_v3", REPLAY, "router replay is not supported for the routers of DeepseekV3ForCausalLM: set actor."),
        ("jamba", f"actor_rollout_ref.actor.{EXPERTS}", "JambaForCausalLM has no experts that are supported (Qwen3-"),
        ("gemma", f"actor_rollout_ref.actor.{ULYSSES[:-1]}3", "size 3 does not divide the model's 4 attention heads"),
        ("qwen3", f"actor_rollout_ref.actor.{TENSOR} actor_rollout_ref.model.lora_rank=2", "LoRA is not supported wi"),
    ],
)
def test_settings_that_the_layers_do_not_support_are_refused_without_weights(
    family, override, message, settings, tiny, tmp_path, capsys, forbid_workers
):
    model = f"actor_rollout_ref.model.path={without_weights(family, tiny, tmp_path / 'model')}"
    size = re.search(r"_parallel_size=(\d)", override)
    processes = f"trainer.n_gpus_per_node={size[1] if size else 1}"
    overrides = [*settings, "algorithm.name=grpo", model, processes, *override.split()]
    assert main_ppo.main([*overrides, "--dry-run"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("error:") == 1 and message in shown and "Traceback" not in shown


def test_padded_rows_are_logged_without_weights(settings, tiny, tmp_path, caplog, forbid_workers):
    model = f"actor_rollout_ref.model.path={without_weights('mamba2', tiny, tmp_path / 'model')}"
    log_padding.cache_clear()
    with caplog.at_level("INFO"):
        assert main_ppo.main([*settings, "algorithm.name=grpo", model, "--dry-run"]) == 0
    assert "Mamba2ForCausalLM: rows are padded instead of packed" in caplog.text


def test_the_names_known_before_the_registries_are_loaded_are_the_registered_ones():
    from verl.engines.base import ENGINES
    from verl.rollout.base import ROLLOUT_ENGINES

    for key, names, registry in (
        ("rollout.name", built_in_engines(), ROLLOUT_ENGINES),
        ("strategy", built_in_strategies(), ENGINES),
    ):
        assert set(names) <= set(registry)
        assert not set(upstream_engines(key)) & set(registry)


# ---- flows and settings of published examples -----------------------------------------------------------------------


def test_keyword_arguments_for_roles_are_settings(settings):
    grpo = [*settings, "algorithm.adv_estimator=grpo"]
    config = PPOTrainer(overrides=grpo, use_critic=False, use_reference_policy=False).config
    assert (config.critic.enable, config.actor_rollout_ref.ref.enable) == (False, False)
    with pytest.raises(ConfigError, match=r"reads values: use null, or an estimator without a critic, such as .*grpo"):
        PPOTrainer(overrides=settings, use_critic=False)
    with pytest.raises(ValueError, match=r"reward\.reward_model\.model_path: null"):
        PPOTrainer(overrides=settings, use_rm=True)
    assert PPOTrainer(PPOTrainer(overrides=grpo).config, use_critic=False).config.critic.enable is False


@pytest.mark.parametrize("method", ["build_flow", "finish_flow"])
def test_a_flow_that_is_not_returned(method, settings):
    forgetful = subclass(**{method: lambda self, *_: None})
    with pytest.raises(ValueError, match=rf"Mine\.{method} returned None, expected a DataFlow: end it with"):
        forgetful(overrides=settings)
