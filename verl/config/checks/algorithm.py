"""Checks of the algorithm: groups, KL, losses and the critic."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from verl.config.errors import Problem
from verl.config.fields import fields_of
from verl.config.schema.ppo import Config
from verl.engines.traits import strategy_traits

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_ALGORITHMS = Path(__file__).parents[2] / "algorithms"


@functools.cache
def declared_signature(decorator: str, name: str) -> ast.arguments | None:
    """The signature of a built-in function that is registered by `@decorator("name")`; None: there is none. It is read
    from the source: to import an estimator would import torch."""
    registered = re.compile(rf"""^@{decorator}\("{re.escape(name)}"[,)]""", re.M)
    for file in sorted(_ALGORITHMS.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not registered.search(text):
            continue
        for node in ast.parse(text).body:
            decorators = getattr(node, "decorator_list", [])
            if any(registered.match(f"@{ast.unparse(item)}".replace("'", '"')) for item in decorators):
                return node.args
    return None


def may_have_critic(config: Config) -> bool:
    """Whether the run may train a critic, as far as is known before the estimators are imported."""
    if config.critic.enable is not None:
        return config.critic.enable
    signature = declared_signature("register_adv_est", config.algorithm.adv_estimator)
    return signature is None or any(argument.arg == "values" for argument in signature.args)


def check_critic(config: Config, needed: bool) -> Iterator[Problem]:
    """`critic.enable` must match the advantage estimator. needed: whether the estimator reads values."""
    enable, estimator = config.critic.enable, config.algorithm.adv_estimator
    if enable is False and needed:
        yield Problem(
            "critic.enable",
            f"false, but algorithm.adv_estimator={estimator} reads values: use null, or an estimator "
            "without a critic, such as algorithm.adv_estimator=grpo with actor_rollout_ref.rollout.n=8. For a critic "
            "that is not on the cluster: placement.local_roles=[critic]",
        )
    if enable is True and not needed:
        yield Problem("critic.enable", f"true, but algorithm.adv_estimator={estimator} does not read values: use null")
    warmup = config.trainer.critic_warmup
    if warmup and not needed:
        message = f"{warmup}, but algorithm.adv_estimator={estimator} has no critic, so nothing would be trained: use 0"
        yield Problem("trainer.critic_warmup", message)


def check_groups(config: Config) -> Iterator[Problem]:
    """Dynamic sampling (`filter_groups`) has groups, and can fill a batch."""
    enabled, n = config.algorithm.filter_groups.enable, config.actor_rollout_ref.rollout.n
    if enabled and n < 2:
        yield Problem(
            _ROLLOUT + "n", f"found {n}, but algorithm.filter_groups drops zero-variance groups: use 2 or more"
        )
    if enabled and config.algorithm.filter_groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.filter_groups.metric",
            "found seq_final_reward, the reward after the KL penalty, but groups are filtered before the penalty is "
            "computed: use seq_reward",
        )
    size, limit = config.data.gen_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    most = limit * (size or config.data.train_batch_size)
    if enabled and limit and most < config.data.train_batch_size:
        yield Problem(
            "algorithm.filter_groups.max_num_gen_batches",
            f"found {limit}, which is at most {most} prompts: too few for data.train_batch_size="
            f"{config.data.train_batch_size}",
        )


def check_kl(config: Config) -> Iterator[Problem]:
    """A KL has a reference."""
    use = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if use and config.actor_rollout_ref.ref.enable is False:
        enabled = "algorithm.use_kl_in_reward" if config.algorithm.use_kl_in_reward else _ACTOR + "use_kl_loss"
        yield Problem(
            "actor_rollout_ref.ref.enable",
            f"false, but {enabled}=true needs the reference: change one of them. For a reference that is not on the "
            "cluster: placement.local_roles=[ref]",
        )


def check_losses(config: Config) -> Iterator[Problem]:
    """The policy loss has the settings that it requires."""
    loss, section = config.actor_rollout_ref.actor.policy_loss, _ACTOR + "policy_loss."
    signature = declared_signature("register_policy_loss", loss.loss_mode)
    keywords = zip(signature.kwonlyargs, signature.kw_defaults) if signature is not None else ()
    for name in (argument.arg for argument, default in keywords if default is None):
        if name in loss and loss[name] is None and name not in loss.loss_kwargs:
            expected = fields_of(type(config))[section + name].expected().removesuffix(" or null")
            yield Problem(section + name, f"null, but the loss {loss.loss_mode} needs it: use a {expected}")
    lower, upper = loss.clip_cov_lb, loss.clip_cov_ub
    if lower >= upper:
        yield Problem(section + "clip_cov_lb", f"found {lower}, expected less than clip_cov_ub={upper}")


def check_distillation(config: Config) -> Iterator[Problem]:
    """Distillation has teachers, and a loss with which the policy can learn from them."""
    distillation, policy = config.distillation, config.actor_rollout_ref
    if not distillation.enabled:
        return
    teachers, loss, section = distillation.teacher_models, distillation.distillation_loss, "distillation."
    if not teachers:
        yield Problem(section + "teacher_models", "no teacher: set distillation.teacher_models.NAME.model_path")
    if len(distillation.teachers_by_key) < len(teachers):
        yield Problem(section + "teacher_models", "two teachers have the same key: use one key per teacher")
    for name, teacher in teachers.items():
        if teacher.model_path is None:
            yield Problem(f"{section}teacher_models.{name}.model_path", "missing: set it to a model folder or a Hub id")
        if teacher.server_url is None and teacher.api_key is not None:
            yield Problem(f"{section}teacher_models.{name}.api_key", "no effect on a local model: set its server_url")
        if teacher.server_url is not None and teacher.trust_remote_code:
            yield Problem(f"{section}teacher_models.{name}.trust_remote_code", "no effect on a server: remove it")
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        yield Problem(
            section + "distillation_loss.loss_mode",
            f"{loss.loss_mode}, but its gradient does not depend on the teacher: use use_policy_gradient=true, or k2",
        )
    on_server = any(teacher.server_url is not None for teacher in teachers.values())
    if on_server and policy.rollout.temperature != 1:
        yield Problem(
            _ROLLOUT + "temperature",
            f"found {policy.rollout.temperature}, but a teacher on a server computes log-probs at temperature 1: use 1",
        )
    if distillation.num_candidates and policy.rollout.filters_log_probs:
        yield Problem(
            _ROLLOUT + "truncated_log_probs",
            "true, but forward_kl_topk compares distributions over all tokens: use false, or no top_k, top_p and min_p",
        )
    for key, strategy in ((_ACTOR, policy.actor.strategy), ("actor_rollout_ref.ref.", policy.ref.strategy)):
        if distillation.num_candidates and not strategy_traits(strategy).candidates:
            yield Problem(f"{key}strategy", f"{strategy} does not support the loss forward_kl_topk: use fsdp, or k2")


def algorithm_notes(config: Config) -> Iterator[str]:
    """Settings of the algorithm that are valid but may be surprising."""
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        yield f"the KL to the reference is applied twice: by algorithm.use_kl_in_reward and by {_ACTOR}use_kl_loss"
    if config.data.gen_batch_size not in (None, config.data.train_batch_size):
        if config.trainer.max_staleness:
            yield "data.gen_batch_size has no effect with trainer.async.max_staleness > 0"
        elif not config.algorithm.filter_groups.enable:
            yield "data.gen_batch_size has no effect without algorithm.filter_groups.enable=true"
