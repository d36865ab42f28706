"""The planner in a run: `verl plan`, the memory check, and `placement: auto`."""

import logging
from dataclasses import replace

import pytest

from tests.trainer.runs import fit
from verl.cli import plan as command
from verl.config import load_config
from verl.planner import devices
from verl.planner.devices import GIB
from verl.trainer.checks import planning
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer

H200 = devices.built_in("H200")


@pytest.fixture
def on_gpu(monkeypatch):
    """Plan for an H200 with this much memory."""

    def use(memory: float = H200.memory) -> None:
        monkeypatch.setattr(planning, "host_profile", lambda name: replace(H200, memory=memory))

    return use


def test_the_plan_has_memory_and_time(settings, capsys):
    assert command.main([*settings, "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "would train" in printed and "ok  memory" in printed
    assert "memory of actor, critic on 1 device" in printed and "update of the actor" in printed
    assert "s with responses of full length" in printed and "seconds: gen " in printed


def test_local_roles_need_memory(settings, on_gpu):
    on_gpu()
    further = ["placement.actor_devices=[0]", "placement.critic_devices=[1]"], ["placement.local_roles=[critic]"]
    runs = [load_config(overrides=[*settings, "trainer.n_gpus_per_node=2", *keys]) for keys in further]
    apart, local = (planning.estimate(config, ["actor", "critic"]) for config in runs)
    assert [group.names for group in local.groups] == [("actor",), ("critic",)]
    assert local.groups[1].peak == apart.groups[1].peak and local.groups[0].peak[1] > 0


def test_the_configuration_may_be_the_first_argument(monkeypatch):
    from verl.trainer import main_ppo

    found = []
    monkeypatch.setattr(main_ppo, "main", lambda arguments, program: found.append(arguments) or 0)
    command.main(["run.yaml", "trainer.seed=1"])
    command.main(["--config", "run.yaml"])
    command.main(["trainer.default_local_dir=a.yaml"])
    assert found == [
        ["--dry-run", "--config", "run.yaml", "trainer.seed=1"],
        ["--dry-run", "--config", "run.yaml"],
        ["--dry-run", "trainer.default_local_dir=a.yaml"],
    ]


def test_a_run_that_does_not_fit_is_refused(settings, on_gpu, caplog):
    on_gpu(memory=1.2 * GIB)
    with pytest.raises(ValueError, match=r"memory: .* needs about 1.5\d GiB per device, but there are 1.20 GiB"):
        PPOTrainer(overrides=settings)
    on_gpu(memory=1.45 * GIB)  # within the error of the model
    PPOTrainer(overrides=settings)
    assert "but there are 1.45 GiB" in caplog.text


@pytest.mark.parametrize("share", [0.95, 0.8, 0.5])
def test_the_settings_of_the_smallest_change_make_the_run_fit(settings, on_gpu, share):
    run = [*settings, "data.max_response_length=256", "data.train_batch_size=256"]
    for section in ("actor_rollout_ref.actor", "critic"):
        run += [f"{section}.use_dynamic_bsz=true", f"{section}.ppo_max_token_len_per_gpu=65536"]
        run += [f"{section}.ppo_mini_batch_size=256"]
    run += [f"{model}.enable_gradient_checkpointing=false" for model in ("actor_rollout_ref.model", "critic.model")]
    names = ["actor", "critic"]
    on_gpu()
    tensors = planning.estimate(load_config(overrides=run), names).peak - H200.reserved
    on_gpu(memory=H200.reserved + share * tensors)
    before = planning.estimate(load_config(overrides=run), names)
    change, plan = planning.smallest_change(before)
    assert not before.fits and plan.fits and change.factor == 1
    settings = [f"{key}={value}" for key, value in change.settings.items()]
    after = planning.estimate(load_config(overrides=[*run, *settings]), names)
    assert after.fits and after.peak == plan.peak


def test_the_keys_of_megatron_are_in_the_estimate(settings, on_gpu):
    on_gpu()
    actor = "actor_rollout_ref.actor."
    run = [*settings, f"{actor}strategy=megatron", "trainer.n_gpus_per_node=8", f"{actor}megatron.dtype=bf16"]
    run += ["data.train_batch_size=8", f"{actor}ppo_mini_batch_size=8"]
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    run += [f"{actor}megatron.{key}={size}" for key, size in sizes.items()]
    run += [f"{actor}megatron.override_transformer_config.recompute_granularity=full"]
    found = planning.estimate(load_config(overrides=run), ["actor", "critic"])
    role, critic = (found.groups[0].roles[i] for i in (0, 1))
    assert (role.layout.tensor, role.layout.pipeline, role.layout.sequence, role.layout.data) == (2, 2, 2, 1)
    assert critic.layout == role.layout  # its sizes are those of the actor unless they are set
    assert (role.weight_bytes, role.compute_bytes, role.checkpointing, critic.checkpointing) == (2, 2, True, "auto")
    items = found.groups[0].memory["update of the actor"]
    assert items["gradients"] == found.groups[0].memory["generation"]["gradients"]  # their buffers stay
    both = role.parameters + critic.parameters
    # weights and gradients over t p = 4 ranks, master weights and moments over all
    assert items["weights"] == 2 * both / 4 and items["gradients"] == 4 * both / 4
    assert items["optimizer"] == 12 * both / 8
    whole = planning.estimate(
        load_config(overrides=[*run, f"{actor}megatron.use_distributed_optimizer=false"]), ["actor"]
    )
    assert whole.groups[0].memory["update of the actor"]["optimizer"] == 12 * role.parameters / 4
    with pytest.raises(ValueError, match=r"megatron for some roles only \(actor: megatron, critic: fsdp\)"):
        planning.estimate(load_config(overrides=[*run, "critic.strategy=fsdp"]), ["actor", "critic"])


def test_placement_auto_sets_the_keys_of_the_best_plan(settings, on_gpu, caplog):
    on_gpu()
    caplog.set_level(logging.INFO, "verl.trainer")
    run = [*settings, "trainer.n_gpus_per_node=2", "placement=auto", "actor_rollout_ref.actor.use_kl_loss=true"]
    trainer = PPOTrainer(overrides=run)
    placement = trainer.config.placement
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("placement=auto: ")]
    assert not placement.auto and "\n" not in line and "; sets placement.auto=False" in line
    assert "s per step (rates: " in line
    chosen = [placement.actor_devices, placement.ref_devices, placement.critic_devices]
    assert trainer.config.trainer.overlap == (len(trainer.pools) > 1)
    used = {number for numbers in chosen for number in numbers or (0, 1)}
    assert ("more of the 2 devices gain less" in line) == (used != {0, 1})
    assert f"placement.actor_devices={placement.actor_devices}" in caplog.text or None in chosen


ASYNC = ["algorithm.adv_estimator=grpo", "trainer.async.max_staleness=1", "actor_rollout_ref.actor.use_kl_loss=true"]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_placement_auto_of_an_asynchronous_run_gives_the_rollout_its_own_devices(settings, on_gpu, caplog, count):
    on_gpu()
    caplog.set_level(logging.INFO, "verl.trainer")
    run = [*settings, *ASYNC, f"trainer.n_gpus_per_node={count}", "placement=auto"]
    trainer = PPOTrainer(overrides=run)
    config = trainer.config
    assert config.rollout_is_separate and not config.placement.auto and "rollout" in trainer.specs
    used = {*config.placement.actor_devices, *config.placement.rollout_devices, *(config.placement.ref_devices or ())}
    assert not set(config.placement.actor_devices) & set(config.placement.rollout_devices)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("placement=auto: ")]
    assert f"placement.rollout_devices={config.placement.rollout_devices}".replace(", ", ",") in line
    assert ("no role uses" in caplog.text) == (used != set(range(count)))
    assert trainer.plan().count("best *") == 2


#: adapters fix the tensor-parallel size: two devices generate, and one trains
FIXED = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("overrides", "memory", "message"),
    [
        (["placement.actor_devices=[0]"], H200.memory, "placement.actor_devices is set: remove one of them"),
        (["placement=best"], H200.memory, "teacher_devices, or auto"),
        ([*ASYNC, "trainer.n_gpus_per_node=1"], H200.memory,
         "max_staleness=1 needs a rollout on separate devices, but there is one device"),
        ([*ASYNC[:2], *FIXED], H200.memory,
         "no placement on 2 devices with a rollout on separate devices, .*: use 3 devices; "),
        (ASYNC, 0.5 * GIB, r"fits; .*; or use trainer.async.max_staleness=0$"),
    ],
)  # fmt: skip
def test_placement_auto_says_why_there_is_none(overrides, memory, message, settings, on_gpu):
    on_gpu(memory)
    with pytest.raises(ValueError, match=message):
        PPOTrainer(overrides=[*settings, "trainer.n_gpus_per_node=2", "placement=auto", *overrides])


def test_the_plan_of_an_asynchronous_run_has_only_placements_that_it_accepts(settings, on_gpu, capsys):
    on_gpu()
    own = ["trainer.n_gpus_per_node=4", "placement.actor_devices=[2,3]", "placement.rollout_devices=[0]"]
    assert command.main([*settings, *ASYNC, *own]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("placements on 4 devices") :]
    assert table.count("rollout on device") == 2  # of the best one and the configured one
    assert "configured *  actor, ref on devices 2, 3" in table and "rollout on device 0\n" in table
    chosen = planning.estimate(load_config(overrides=[*settings, *ASYNC, *own]), ["actor", "rollout", "ref"])
    for plan in planning._search(load_config(overrides=[*settings, *ASYNC, *own]), chosen).plans(4, 9):
        keys = [f"{key}={value}" for key, value in planning.overrides_of(plan, 4).items()]
        assert load_config(overrides=[*settings, *ASYNC, *own[:1], *keys]).rollout_is_separate


@pytest.mark.parametrize(
    ("placement", "idle"),
    [
        (["actor_devices=[0,1]", "rollout_devices=[2]"], "device 3"),
        (["actor_devices=[0]", "rollout_devices=[1]"], "devices 2, 3"),
        (["actor_devices=[0,1]", "rollout_devices=[2,3]"], ""),
        ([], ""),
    ],
)
def test_devices_without_a_role_are_named(settings, on_gpu, caplog, placement, idle):
    on_gpu()
    run = [*settings, "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=4"]
    PPOTrainer(overrides=[*run, *(f"placement.{each}" for each in placement)])
    assert (f"no role uses {idle} of 4: " in caplog.text) if idle else "no role uses" not in caplog.text


@pytest.mark.slow
def test_an_asynchronous_run_trains_with_the_placement_of_auto(settings):
    more = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", "placement=auto", "trainer.total_training_steps=3"]
    trainer, reports = fit([*settings, *ASYNC, *more], PPOTrainer)
    assert (trainer.config.placement.actor_devices, trainer.config.placement.rollout_devices) == ([0], [1])
    assert [report.step for report in reports] == [1, 2, 3]
    assert all(report.metrics["async/staleness_max"] <= 1 for report in reports)


def test_placement_auto_needs_a_model_that_is_modelled(settings, on_gpu, monkeypatch):
    on_gpu()

    def unknown(*_):
        raise ValueError("a mixture of experts")

    monkeypatch.setattr(planning, "shapes_of", unknown)
    with pytest.raises(ValueError, match="placement=auto is not possible: a mixture of experts"):
        PPOTrainer(overrides=[*settings, "placement=auto"])
    assert main(["--dry-run", *settings]) == 0  # no estimate, no error


def test_a_simulation_needs_no_files(capsys):
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    grpo = "algorithm.adv_estimator=grpo"
    assert command.main(["--gpus", "8", "--gpu", "A100", "--model", "7B", grpo, kl]) == 0
    printed = capsys.readouterr().out
    assert "256 prompts x 1 sample" in printed or "prompts x" in printed
    assert "memory of actor, ref on" in printed and "best *" in printed and "GiB (A100)" in printed
    own = ["placement.actor_devices=[0,1,2,3]", "placement.ref_devices=[4,5,6,7]"]
    assert command.main(["--gpus", "8", "--gpu", "A100", grpo, kl, *own]) == 0
    printed = capsys.readouterr().out
    assert "configured *  actor, rollout on devices 0-3" in printed and max(map(len, printed.splitlines()[1:])) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1", "--gpu", "A100", "--model", "70B"], "no placement on 1 device fits; smallest change"),
        # 7.6 G parameters: 16 bytes each do not fit into 80 GB, 2 bytes each of frozen weights do
        (["--gpus", "1", "--gpu", "A100", "--model", "7B"], "\n  LoRA also fits ("),
        (["--gpus", "1", "--gpu", "A100", "--model", "7B"], "\n  QLoRA also fits ("),
        (["--gpus", "1", "--gpu", "B100"], "no profile of the GPU 'B100': did you mean 'H100'?"),
        (["--gpus", "1", "--model", "7"], "no built-in model '7': did you mean '7B'?"),
        (["--gpus", "1", "--model", "./none"], "there is no folder './none'"),
        (["--gpus", "12"], "--gpus 12: expected a multiple of 8, the GPUs of a node"),
        (["--gpus", "8", "data.train_batch_sise=8"], "did you mean data.train_batch_size?"),
        (["--gpus", "8", "--model", "70B", "actor_rollout_ref.actor.strategy=megatron"], ": use 16 devices"),
    ],
)
def test_a_simulation_that_is_not_possible_is_one_error(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        command.main([*arguments, "algorithm.adv_estimator=grpo"])
    captured = capsys.readouterr()
    assert end.value.code == 1 and not captured.out and message in captured.err


def test_a_mixture_of_experts_is_simulated(capsys):
    run = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.strategy=megatron"]
    run += ["actor_rollout_ref.actor.megatron.expert_model_parallel_size=8"]
    assert command.main(["--gpus", "16", "--model", "30B-A3B", *run]) == 0
    assert "update of the actor" in capsys.readouterr().out
